"""Pods of sessions: restricted, without credentials, placed as the BaseModel requires."""

from collections.abc import Iterator

import pytest

from tinkercloud_crds import labels
from tinkercloud_operator.children import support_objects
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    EXTERNAL,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_session,
)

PLACEMENT = {
    "nodeSelector": {"pool": "gpu"},
    "nodeAffinity": [{"key": "zone", "operator": "In", "values": ["a", "b"]}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priorityClassName": "training",
    "queueName": "research",
    "runtimeClassName": "nvidia",
}
VOLUME = {"volume": {"claimName": "models", "path": "qwen/3-8b"}}
WORKERS = a_base_model(trainer=TRAINERS, sampler=SAMPLERS)
COLOCATED_ENGINES = a_base_model(
    trainer={**TRAINERS, "replicas": 1}, sampler={**COLOCATED, "replicas": 2}
)
FAST_NETWORK = a_base_model(
    trainer={
        **TRAINERS,
        "extendedResources": [{"name": "rdma/hca", "count": 1}],
        "environment": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
    }
)

BUILDS = {
    "head alone": a_build(),
    "workers": a_build(WORKERS),
    "engines": a_build(a_base_model(trainer=TRAINERS, sampler={**ENGINES, "replicas": 1})),
    "colocated engines": a_build(COLOCATED_ENGINES),
    "servers of others": a_build(a_base_model(trainer=TRAINERS, sampler=EXTERNAL)),
    "samplers alone": a_build(WORKERS, a_session(role="Sampler", lora=None)),
    "volume": a_build(a_base_model(source=VOLUME, trainer=TRAINERS), checkpoint_claim="kept"),
    "uri": a_build(a_base_model(source={"uri": "s3://models/qwen", "secretName": "store"})),
    "placed": a_build(a_base_model(trainer=TRAINERS, placement=PLACEMENT)),
    "a fast network": a_build(FAST_NETWORK),
    "no user of its own": a_build(WORKERS, run_as_user=None, fs_group=None),
    "scratch space reserved": a_build(WORKERS, reserve_scratch=True),
}
HARMLESS_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def groups(build: Build) -> dict[str, Json]:
    """Return the groups of a session's RayCluster by component."""
    spec = ray_cluster(build)["spec"]
    workers = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"], **workers}


def pod_specs(build: Build) -> dict[str, Json]:
    return {name: group["template"]["spec"] for name, group in groups(build).items()}


def containers(pod: Json) -> list[Json]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def breaches(pod: Json) -> Iterator[str]:
    """Yield violations of the restricted profile of Pod Security."""
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from (
        f"volume {volume['name']}"
        for volume in pod["volumes"]
        if not volume.keys() - {"name"} <= HARMLESS_VOLUMES
    )
    of_pod = pod["securityContext"]
    if of_pod.get("sysctls"):
        yield "sysctls"
    for container in containers(pod):
        yield from (
            f"{container['name']}: {breach}"
            for breach in container_breaches(of_pod | container["securityContext"])
        )
        yield from (
            f"{container['name']}: host port"
            for port in container.get("ports", [])
            if "hostPort" in port
        )


def container_breaches(security: Json) -> Iterator[str]:
    wanted = {
        "allowPrivilegeEscalation": security.get("allowPrivilegeEscalation") is False,
        "capabilities": security.get("capabilities") == {"drop": ["ALL"]},
        "privileged": not security.get("privileged", False),
        "procMount": "procMount" not in security,
        "runAsNonRoot": security.get("runAsNonRoot") is True,
        "runAsUser": security.get("runAsUser", 1) != 0,
        "seccompProfile": security.get("seccompProfile") == {"type": "RuntimeDefault"},
    }
    yield from (name for name, holds in wanted.items() if not holds)


@every_build
def test_every_container_meets_restricted_pod_security(build: Build) -> None:
    found = {name: list(breaches(pod)) for name, pod in pod_specs(build).items()}

    assert found == {name: [] for name in groups(build)}


def test_a_privileged_container_would_be_detected() -> None:
    pod = pod_specs(a_build())["head"]
    pod["containers"][0]["securityContext"] = {"privileged": True}
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})

    assert set(breaches(pod)) == {
        "volume host",
        "head: allowPrivilegeEscalation",
        "head: capabilities",
        "head: privileged",
    }


@every_build
def test_no_container_can_write_its_root_file_system(build: Build) -> None:
    all_containers = [item for pod in pod_specs(build).values() for item in containers(pod)]

    assert all(item["securityContext"]["readOnlyRootFilesystem"] for item in all_containers)


@every_build
def test_no_pod_has_a_service_account_token_or_the_addresses_of_services(build: Build) -> None:
    pods = pod_specs(build).values()

    assert not any(pod["automountServiceAccountToken"] for pod in pods)
    assert not any(pod["enableServiceLinks"] for pod in pods)


@every_build
def test_every_mount_has_its_volume(build: Build) -> None:
    mounted = {
        name: {mount["name"] for item in containers(pod) for mount in item["volumeMounts"]}
        for name, pod in pod_specs(build).items()
    }
    volumes = {
        name: {volume["name"] for volume in pod["volumes"]}
        for name, pod in pod_specs(build).items()
    }

    assert mounted == volumes


@every_build
def test_pods_are_labelled_so_that_services_and_policies_find_them(build: Build) -> None:
    found = {name: group["template"]["metadata"]["labels"] for name, group in groups(build).items()}

    assert found == {
        name: {
            labels.SESSION_LABEL: "one",
            labels.COMPONENT_LABEL: name.removesuffix("-0"),
            labels.MANAGED_BY_LABEL: "tinkercloud",
        }
        for name in groups(build)
    }


@every_build
def test_a_head_has_time_to_save_its_state_before_it_is_killed(build: Build) -> None:
    graces = {pod["terminationGracePeriodSeconds"] for pod in pod_specs(build).values()}

    assert min(graces) > build.settings.drain_seconds + build.settings.suspend_seconds


def test_pods_get_the_time_to_save_of_their_base_model() -> None:
    head = {"image": "worker:1", "suspendSeconds": 1080}
    build = a_build(a_base_model(trainer=TRAINERS, head=head), drain_seconds=20)

    graces = {pod["terminationGracePeriodSeconds"] for pod in pod_specs(build).values()}

    assert graces == {20 + 1080 + 15}
    assert support_objects.head_config(build).timings.suspend_seconds == 1080


@pytest.mark.parametrize(
    ("build", "gpus"),
    [
        ("head alone", {"head": None}),
        ("workers", {"head": None, "trainer": "4", "sampler-0": None, "sampler-0 engine": "2"}),
        ("samplers alone", {"head": None, "sampler-0": None, "sampler-0 engine": "2"}),
    ],
)
def test_only_trainers_and_engines_request_gpus(build: str, gpus: dict[str, str | None]) -> None:
    asked = {
        name if container["name"] in {"head", "worker"} else f"{name} {container['name']}": (
            container["resources"]
        )
        for name, pod in pod_specs(BUILDS[build]).items()
        for container in pod["containers"]
    }

    limits = {name: resources["limits"].get("nvidia.com/gpu") for name, resources in asked.items()}
    requests = {name: item["requests"].get("nvidia.com/gpu") for name, item in asked.items()}
    assert limits == requests == gpus


def test_memory_has_equal_request_and_limit_and_cores_have_no_limit() -> None:
    head = {"image": "worker:1", "resources": {"cpu": "2", "memory": "8Gi"}}

    [container] = pod_specs(a_build(a_base_model(head=head)))["head"]["containers"]

    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
    }


def test_pods_have_the_placement_of_the_base_model() -> None:
    pods = pod_specs(BUILDS["placed"])

    wanted = {
        "nodeSelector": {"pool": "gpu"},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": "zone", "operator": "In", "values": ["a", "b"]}
                            ]
                        }
                    ]
                }
            }
        },
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "training",
        "runtimeClassName": "nvidia",
    }
    assert {name: {key: pod[key] for key in wanted} for name, pod in pods.items()} == {
        "head": wanted,
        "trainer": wanted,
    }


def test_without_a_placement_pods_may_run_anywhere() -> None:
    head = pod_specs(a_build())["head"]

    assert not head.keys() & {"nodeSelector", "affinity", "tolerations", "priorityClassName"}


def volumes_of(build: Build) -> dict[str, Json]:
    volumes = pod_specs(build)["head"]["volumes"]
    return {volume["name"]: volume for volume in volumes}


def test_a_model_on_a_volume_is_mounted_read_only_and_not_downloaded() -> None:
    build = BUILDS["volume"]

    head = pod_specs(build)["head"]

    claim = {"claimName": "models", "readOnly": True}
    assert volumes_of(build)["model"] == {"name": "model", "persistentVolumeClaim": claim}
    assert "initContainers" not in head
    assert support_objects.head_config(build).model.path == "/models/qwen/3-8b"


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ({"hub": "Qwen/Qwen3-8B", "secretName": "store"}, "hub:Qwen/Qwen3-8B"),
        ({"uri": "s3://models/qwen", "secretName": "store"}, "s3://models/qwen"),
    ],
)
def test_a_remote_model_is_downloaded_first_with_its_credentials(source: Json, where: str) -> None:
    build = a_build(a_base_model(source=source))

    head = pod_specs(build)["head"]

    [fetching] = head["initContainers"]
    folder = support_objects.head_config(build).model.path
    assert fetching["command"] == ["python", "-m", "tinkercloud_worker.fetch_model", where, folder]
    assert fetching["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert folder.startswith("/scratch/")
    assert {"name": "scratch", "mountPath": "/scratch"} in fetching["volumeMounts"]


def test_checkpoints_on_a_volume_are_mounted_where_the_head_writes_them() -> None:
    build = a_build(checkpoint_claim="kept", checkpoint_root="file:///checkpoints")

    [container] = pod_specs(build)["head"]["containers"]

    claim = {"claimName": "kept"}
    assert volumes_of(build)["checkpoints"]["persistentVolumeClaim"] == claim
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in container["volumeMounts"]


ALL_WITH_A_STORE = [
    {"trainer": TRAINERS, "sampler": ENGINES},
    {"trainer": TRAINERS, "sampler": COLOCATED},
]
with_workers = pytest.mark.parametrize(
    "shapes", ALL_WITH_A_STORE, ids=["engines", "colocated engines"]
)


@with_workers
def test_only_the_head_mounts_the_checkpoint_volume(shapes: Json) -> None:
    pods = pod_specs(a_build(a_base_model(**shapes), checkpoint_claim="kept"))

    assert {
        (name, item["name"])
        for name, pod in pods.items()
        for item in containers(pod)
        for mount in item["volumeMounts"]
        if mount["name"] == "checkpoints"
    } == {("head", "head")}
    assert [
        name
        for name, pod in pods.items()
        if any(volume["name"] == "checkpoints" for volume in pod["volumes"])
    ] == ["head"]


@with_workers
def test_containers_have_only_the_credentials_of_stores_that_they_open(
    shapes: Json,
) -> None:
    source = {"uri": "s3://models/qwen", "secretName": "of-models"}
    build = a_build(a_base_model(source=source, **shapes), checkpoint_secret="of-checkpoints")

    found = {
        (name, item["name"]): [each["secretRef"]["name"] for each in item.get("envFrom", [])]
        for name, pod in pod_specs(build).items()
        for item in containers(pod)
    }

    # For duplicate keys the last one wins.
    wanted = {"head": ["of-checkpoints"], "fetch-model": ["of-checkpoints", "of-models"]}
    assert found == {(name, item): wanted.get(item, []) for name, item in found}
    everything = [item for pod in pod_specs(build).values() for item in containers(pod)]
    assert all("valueFrom" not in entry for item in everything for entry in item["env"])


def test_pods_run_as_the_configured_user_and_group() -> None:
    pods = pod_specs(a_build(WORKERS, run_as_user=1000, fs_group=2000)).values()

    assert [pod["securityContext"] for pod in pods] == [
        {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 2000,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    ] * 3


def test_users_and_groups_may_be_left_to_the_namespace() -> None:
    head = pod_specs(BUILDS["no user of its own"])["head"]

    assert head["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
    with_group = pod_specs(a_build(run_as_user=None, fs_group=2000))["head"]["securityContext"]
    assert (with_group.get("runAsUser"), with_group["fsGroup"]) == (None, 2000)


@with_workers
def test_each_pod_may_request_its_scratch_space_once(shapes: Json) -> None:
    small, large = {"scratch": "4Gi"}, {"scratch": "40Gi"}
    base_model = a_base_model(
        head={"image": "worker:1", "resources": small},
        **{part: {**shape, "resources": large} for part, shape in shapes.items()},
    )

    asked, unasked = (
        {
            (name.partition("-")[0], item["resources"]["requests"].get("ephemeral-storage"))
            for name, pod in pod_specs(a_build(base_model, reserve_scratch=reserves)).items()
            for item in pod["containers"]
        }
        for reserves in (True, False)
    )

    worker = {name for name, _ in asked} - {"head"}
    assert {pair for pair in asked if pair[1] is not None} == {
        ("head", "4Gi"),
        *((name, "40Gi") for name in worker),
    }
    assert {size for _, size in unasked} == {None}


@pytest.mark.parametrize("policy", ["Always", None])
def test_all_images_have_the_configured_pull_policy(
    policy: str | None,
) -> None:
    base_model = a_base_model(trainer=TRAINERS, sampler=ENGINES)

    pods = pod_specs(a_build(base_model, image_pull_policy=policy)).values()

    policies = {item.get("imagePullPolicy") for pod in pods for item in containers(pod)}
    assert policies == {policy}


def test_images_are_pulled_with_the_configured_secrets() -> None:
    pods = pod_specs(a_build(WORKERS, image_pull_secrets=["registry"]))

    assert [pod["imagePullSecrets"] for pod in pods.values()] == [[{"name": "registry"}]] * 3


@pytest.mark.parametrize("own", ["trainer:2", None], ids=["their own", "the head's"])
def test_workers_run_their_own_image_or_the_heads(own: str | None) -> None:
    build = a_build(a_base_model(trainer={**TRAINERS, "image": own}, sampler=SAMPLERS))

    images = {
        name: [container["image"] for container in pod["containers"]]
        for name, pod in pod_specs(build).items()
    }

    assert images == {
        "head": ["worker:1"],
        "trainer": [own or "worker:1"],
        "sampler-0": ["worker:1", "sglang:1"],
    }
