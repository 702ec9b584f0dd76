"""Extended resources and variables of worker pods, only in containers that compute."""

import pytest

from tinkercloud_crds.pods.extras import ExtendedResource
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_session,
)

TRAINER_EXTRAS: Json = {
    "extendedResources": [
        {"name": "rdma/hca", "count": 2},
        {"name": "hugepages-2Mi", "count": 2560},
    ],
    "environment": [
        {"name": "NCCL_IB_HCA", "value": "mlx5"},
        {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"},
    ],
}
SAMPLER_EXTRAS: Json = {
    "extendedResources": [{"name": "rdma/hca", "count": 1}],
    "environment": [{"name": "NCCL_DEBUG", "value": "WARN"}],
}
TRAINER_AMOUNTS = {"rdma/hca": "2", "hugepages-2Mi": "5120Mi"}
SAMPLER_AMOUNTS = {"rdma/hca": "1"}
NAMES = {"rdma/hca", "hugepages-2Mi"}
VARIABLES = {"NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}


def a_build_with(sampler: Json, **session: object) -> Build:
    shapes = {"trainer": TRAINERS | TRAINER_EXTRAS, "sampler": {**sampler, **SAMPLER_EXTRAS}}
    return a_build(a_base_model(**shapes), a_session(**session))


def containers(build: Build) -> dict[str, Json]:
    """Return all containers of a session, by group and container name."""
    spec = ray_cluster(build)["spec"]
    groups = [{"groupName": "head", **spec["headGroupSpec"]}, *spec["workerGroupSpecs"]]
    pods = {group["groupName"]: group["template"]["spec"] for group in groups}
    return {
        f"{name} {container['name']}": container
        for name, pod in pods.items()
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    }


def amounts(container: Json) -> dict[str, str]:
    """Return a container's requests of the extended resources, which must equal its limits."""
    asked, limited = (
        {name: amount for name, amount in container["resources"][kind].items() if name in NAMES}
        for kind in ("requests", "limits")
    )
    assert asked == limited
    return asked


def variables(container: Json) -> dict[str, str]:
    found = {item["name"]: item.get("value", "") for item in container["env"]}
    assert len(found) == len(container["env"]), "a variable that is set twice"
    return {name: value for name, value in found.items() if name in VARIABLES}


def trainer_extras() -> tuple[Json, Json]:
    return TRAINER_AMOUNTS, {name: VARIABLES[name] for name in list(VARIABLES)[:2]}


def sampler_extras() -> tuple[Json, Json]:
    return SAMPLER_AMOUNTS, {"NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("build", "trainers", "samplers"),
    [
        (a_build_with(SAMPLERS), {"trainer worker"}, {"sampler-0 engine"}),
        (
            a_build_with(ENGINES),
            {"trainer worker"},
            {"sampler-0 engine", "sampler-1 engine"},
        ),
        (
            a_build_with(COLOCATED),
            {"trainer-0 worker", "trainer-1 worker"},
            {f"trainer-{pod} engine-{number}" for pod in (0, 1) for number in (0, 1)},
        ),
        (
            a_build_with(COLOCATED, role="Sampler", lora=None),
            set(),
            {f"sampler-{number} engine" for number in range(4)},
        ),
    ],
    ids=["an engine", "engines", "colocated engines", "samplers alone"],
)
def test_only_compute_containers_have_extended_resources_and_variables(
    build: Build, trainers: set[str], samplers: set[str]
) -> None:
    found = {
        name: (amounts(container), variables(container))
        for name, container in containers(build).items()
    }

    wanted: dict[str, tuple[Json, Json]] = dict.fromkeys(found, ({}, {}))
    wanted |= dict.fromkeys(trainers, trainer_extras()) | dict.fromkeys(samplers, sampler_extras())
    assert found == wanted
    assert any("fetch-model" in name for name in found)


def test_the_operators_own_variables_are_kept() -> None:
    plain = containers(a_build(a_base_model(trainer=TRAINERS, sampler=ENGINES)))

    extended = containers(a_build_with(ENGINES))

    assert extended.keys() == plain.keys()
    for name, container in plain.items():
        assert [item for item in extended[name]["env"] if item in container["env"]] == container[
            "env"
        ]
        for kind in ("requests", "limits"):
            needs = container["resources"][kind]
            assert extended[name]["resources"][kind] | needs == extended[name]["resources"][kind]


def test_a_pod_requests_the_total_of_its_containers() -> None:
    [_, trainers] = a_build_with(COLOCATED).resolved.pods

    assert trainers.extended == (
        ExtendedResource(name="rdma/hca", count=2 + 2 * 1),
        ExtendedResource(name="hugepages-2Mi", count=2560),
    )
