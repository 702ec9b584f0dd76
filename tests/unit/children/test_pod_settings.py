"""Operator settings that apply to all session containers: limits, downloads, CAs."""

from collections.abc import Iterator

import pytest

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
)

OFFERS = {
    "head alone": a_base_model(),
    "engines": a_base_model(trainer=TRAINERS, sampler=ENGINES),
    "colocated engines": a_base_model(trainer=TRAINERS, sampler=COLOCATED),
}
every_offer = pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)


def pods(build: Build) -> list[Json]:
    spec = ray_cluster(build)["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def containers(build: Build) -> Iterator[Json]:
    """Yield all containers of a session, including init containers."""
    for pod in pods(build):
        yield from [*pod["initContainers"], *pod["containers"]]


@every_offer
def test_cores_are_limited_everywhere_or_nowhere(offer: BaseModelSpec) -> None:
    limited = [each["resources"] for each in containers(a_build(offer, limit_cores=True))]
    free = [each["resources"]["limits"] for each in containers(a_build(offer))]

    # QoS class Guaranteed requires equal requests and limits in all containers.
    for resources in limited:
        for name in ("cpu", "memory"):
            assert resources["limits"][name] == resources["requests"][name]
    assert not [limits for limits in free if "cpu" in limits]


@every_offer
def test_a_download_has_the_configured_memory(offer: BaseModelSpec) -> None:
    build = a_build(offer, download_memory="10Gi")
    downloads = [each for each in containers(build) if each["name"] == "fetch-model"]

    assert len(downloads) == len(pods(build))
    for each in downloads:
        assert each["resources"]["requests"]["memory"] == "10Gi"
        assert each["resources"]["limits"]["memory"] == "10Gi"


def test_a_model_is_downloaded_at_its_revision() -> None:
    offer = a_base_model(source={"hub": "Qwen/Qwen3-8B", "revision": "0a1b2c"})
    [pod] = pods(a_build(offer))
    [download] = pod["initContainers"]

    assert "hub:Qwen/Qwen3-8B@0a1b2c" in download["command"]


@every_offer
def test_all_containers_except_engines_trust_the_configured_ca(
    offer: BaseModelSpec,
) -> None:
    build = a_build(offer, ca_config_map="authorities", ca_key="ca.pem")

    for pod in pods(build):
        [volume] = [each for each in pod["volumes"] if each["name"] == "ca-bundle"]
        assert volume["configMap"] == {"name": "authorities"}
    for each in containers(build):
        variables = {entry["name"]: entry.get("value") for entry in each["env"]}
        if each["name"] not in {"head", "worker", "fetch-model"}:
            assert "SSL_CERT_FILE" not in variables
            continue
        [mount] = [each for each in each["volumeMounts"] if each["name"] == "ca-bundle"]
        assert mount["readOnly"]
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            assert variables[name] == f"{mount['mountPath']}/ca.pem"


@every_offer
def test_without_a_configured_ca_containers_trust_those_of_their_images(
    offer: BaseModelSpec,
) -> None:
    for each in containers(a_build(offer)):
        assert "SSL_CERT_FILE" not in {entry["name"] for entry in each["env"]}
