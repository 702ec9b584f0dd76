"""Older or missing definitions: sessions report the problem and the solution."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_kube.errors import is_undeclared
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.cluster.controllers import kuberay as current_kuberay
from tinkercloud_testing.cluster.controllers.older_kuberay import install_older_definition
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    SOON_SECONDS,
    Sessions,
    a_base_model,
)
from tinkercloud_testing.cluster.image_build.programs import ROOT
from tinkercloud_testing.cluster.kube_api.client import Cluster, KubectlFailed
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.kube_api.existing import existing_cluster
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.sessions import a_build

pytestmark = pytest.mark.skipif(
    existing_cluster() is not None, reason="replaces definitions that an existing cluster uses"
)
OLDER = {"v1.4.2": ("1.4 or older", "spec.authOptions"), "v1.5.1": ("1.5", "secretName")}


@pytest.fixture(scope="module")
def plane(cluster_folder: Path) -> Iterator[Cluster]:
    """Run a control plane without KubeRay, whose definitions these tests replace."""
    folder = cluster_folder / "definitions"
    with a_control_plane(folder) as made:
        yield made.cluster


@contextmanager
def a_namespace(cluster: Cluster, folder: Path) -> Iterator[tuple[str, RunningOperator]]:
    """Create a namespace and run an operator for it."""
    with cluster.a_namespace("definitions") as namespace:
        kubeconfig = operator_account(cluster, namespace, folder)
        with an_operator(kubeconfig, namespace, folder, last_checkpoint_seconds=1) as operator:
            yield namespace, operator
            cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=90s")
            sys.stdout.write(operator.program.log_tail())


def events_of(cluster: Cluster, namespace: str, reason: str) -> list[Any]:
    events = cluster.objects("events", namespace)
    return [each for each in events if each["reason"] == reason]


@pytest.mark.long
@pytest.mark.parametrize("version", ["v1.4.2", "v1.5.1"])
def test_an_outdated_kuberay_is_reported_with_its_version_and_the_required_one(
    plane: Cluster, cluster_folder: Path, version: str
) -> None:
    install_definitions(plane)
    install_older_definition(plane, version)
    with a_namespace(plane, cluster_folder) as (namespace, operator):
        sessions = Sessions(plane, namespace)
        plane.apply(a_base_model(namespace))
        sessions.make("one")
        sessions.wait_for_reason("one", "KubeRayTooOld")

        found, lacking = OLDER[version]
        condition = sessions.condition("one", "Stalled")
        assert condition["status"] == "True"
        assert f"is from KubeRay {found} and lacks" in condition["message"]
        assert lacking in condition["message"]
        assert "requires KubeRay 1.6 or newer" in condition["message"]
        assert len(events_of(plane, namespace, "KubeRayTooOld")) == 1
        assert sessions.children("one") == []
        outdated = operator.counted("tinkercloud_definitions_outdated")
        assert outdated['{kind="RayCluster"}'] == 1

        current_kuberay.install_definitions(plane)
        sessions.wait_for_reason("one", "Provisioning")
        assert "RayCluster/one" in sessions.children("one")


def test_the_message_about_an_unknown_field_is_the_one_that_is_recognized(
    plane: Cluster,
) -> None:
    install_older_definition(plane, "v1.4.2")
    wanted = ray_cluster(a_build())
    wanted["metadata"]["namespace"] = "default"

    options = ("--server-side", "--validate=false", "-f", "-")
    with pytest.raises(KubectlFailed) as answer:
        plane.kubectl("apply", *options, stdin=json.dumps(wanted))

    assert is_undeclared(str(answer.value))


@pytest.mark.long
def test_sessions_progress_under_older_definitions_that_drop_status_fields(
    plane: Cluster, cluster_folder: Path
) -> None:
    current_kuberay.install_definitions(plane)
    install_definitions(plane)
    text = (ROOT / "crds" / "tinkercloud.dev_trainingsessions.yaml").read_text()
    definition = yaml.safe_load(text)
    [served] = definition["spec"]["versions"]
    status = served["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del status["restarts"]
    status["phase"]["enum"].remove("Provisioning")
    plane.apply_text(json.dumps(definition))

    with a_namespace(plane, cluster_folder) as (namespace, operator):
        sessions = Sessions(plane, namespace)
        plane.apply(a_base_model(namespace))
        sessions.make("one")
        sessions.wait_for_reason("one", "Provisioning")

        accepted = sessions.condition("one", "Accepted")
        outdated = operator.counted("tinkercloud_definitions_outdated")
        assert "restarts" not in sessions.status("one")
        assert (accepted["status"], accepted["reason"]) == ("True", "DefinitionsOutdated")
        assert "status.restarts" in accepted["message"]
        assert "tinkercloud-crds" in accepted["message"]
        assert outdated['{kind="TrainingSession"}'] == 1
        assert outdated['{kind="BaseModel"}'] == 0

        install_definitions(plane)
        wait_until(
            lambda: sessions.condition("one", "Accepted")["reason"] == "Accepted",
            "the new definitions are noticed",
            SOON_SECONDS,
        )
        assert sessions.status("one")["restarts"] == 0
        assert sessions.status("one")["phase"] == "Provisioning"


def test_missing_definitions_are_reported_once_and_their_installation_is_noticed(
    plane: Cluster, cluster_folder: Path
) -> None:
    current_kuberay.install_definitions(plane)
    install_definitions(plane)
    plurals = ("basemodels", "trainingsessions")
    definitions = [f"crd/{plural}.tinkercloud.dev" for plural in plurals]
    plane.kubectl("delete", *definitions, "--wait=true")
    with a_namespace(plane, cluster_folder) as (namespace, operator):
        wait_until(
            lambda: "install the chart tinkercloud-crds" in operator.get("/readyz"),
            "the operator says what is missing",
            SOON_SECONDS,
        )
        assert operator.rest() == operator.rest()
        log = operator.program.log.read_text()
        assert log.count("install the chart tinkercloud-crds") == 1

        install_definitions(plane)
        wait_until(lambda: operator.get("/readyz") == "leading", "the operator leads", SOON_SECONDS)
        plane.apply(a_base_model(namespace))
        sessions = Sessions(plane, namespace)
        sessions.make("one")
        sessions.wait_for_reason("one", "Provisioning")
