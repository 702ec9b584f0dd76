"""Programs as Jobs: real pods that use a real API server; the session's own pods are simulated."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    MODEL,
    a_base_model,
    a_session,
    a_volume,
)
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import a_secret
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.nodes.node import HOST_ADDRESS, RealNode
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OWNER = "bootstrap"
SECONDS = 240
"""Longer than anything takes on a busy machine."""
SOURCE = """
import os, sys, time, httpx, tinker

headers = {"X-API-Key": os.environ["TINKER_API_KEY"]}
server = httpx.Client(base_url=os.environ["TINKER_BASE_URL"], headers=headers)
server.post("/api/v1/create_session", json={"sdk_version": "1"}).raise_for_status()
sessions = tinker.RestClient().list_sessions().result().sessions
# To the stream of the exit message: a node does not keep the order of two streams.
print("attempt", len(sessions), file=sys.stderr)
if len(sessions) == 1:
    sys.exit("the first attempt fails")
time.sleep(3600)
"""
"""Fails once, then runs until it is stopped: each attempt is a client session of the server."""


@pytest.fixture(scope="module")
def namespace(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, own_node: RealNode
) -> Iterator[str]:
    install_definitions(cluster)
    kwok.add("programs-0")
    image = program_image("api-server")
    own_node.load(image)
    offered: dict[str, Any] = {"trainer": {}, "sampler": {}}
    offered["programs"] = {
        "images": [image.name],
        "resources": {"cpu": "1", "memory": "512Mi", "scratch": "64Mi"},
    }
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with cluster.a_namespace("programs", **labels) as name:
        cluster.apply(a_base_model(name, **offered), *a_volume(name))
        cluster.apply(a_secret("research-key", name, {"apiKey": API_KEY}))
        yield name


@pytest.fixture(scope="module")
def server(
    cluster: Cluster,
    namespace: str,
    cluster_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Run an operator and an API server, which pods reach at this machine's address."""
    folder = tmp_path_factory.mktemp("api")
    kubeconfig = operator_account(cluster, namespace, cluster_folder)
    account = cluster.kubeconfig_of("tinkercloud-api", namespace, folder)
    settings = {
        "KUBECONFIG": str(account),
        "TINKERCLOUD_PROVIDER": "kubernetes",
        "TINKERCLOUD_NAMESPACE": namespace,
        "TINKERCLOUD_CHECKPOINT_ROOT": (folder / "store").as_uri(),
        "TINKERCLOUD_HOST": "0.0.0.0",  # noqa: S104 - pods connect to it
    }
    running = Server({}, folder, settings)
    url = f"http://{HOST_ADDRESS}:{running.port}"
    wishes: dict[str, object] = {
        "api_url": url,
        "image_pull_policy": "Never",
        # Simulated heads save nothing.
        "last_checkpoint_seconds": 1,
    }
    with an_operator(kubeconfig, namespace, cluster_folder, **wishes) as operator:
        running.start()
        yield running
        running.stop()
        sys.stdout.write(running.log[-4000:] + operator.program.log_tail())


def program_of(cluster: Cluster, namespace: str, session: str) -> dict[str, Any]:
    found = cluster.get("trainingsession", session, namespace).get("status", {})
    status: dict[str, Any] = found.get("program", {})
    return status


def test_a_program_fails_once_resumes_is_stopped_and_leaves_nothing(
    cluster: Cluster, namespace: str, server: Server
) -> None:
    request = {"source": SOURCE, "base_model": MODEL, "name": "twice"}
    made = server.post("programs", request).json()
    where = f"/api/v1/programs/{made['program_id']}"

    def shown() -> dict[str, Any]:
        return server.request("GET", where).json()

    def output() -> str:
        return str(server.request("GET", f"{where}/logs").json()["text"])

    wait_until(lambda: "attempt 2" in output(), "the second attempt", SECONDS)
    wait_until(lambda: shown()["restarts"] == 1, "the failure to be counted", SECONDS)
    assert shown()["phase"] == "Running"
    assert "the first attempt fails" in shown()["message"]
    [session] = cluster.objects("trainingsessions", namespace)
    name = session["metadata"]["name"]
    job = cluster.get("job", f"{name}-program", namespace)
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert cluster.get("networkpolicy", f"{name}-program", namespace)

    server.stop()
    server.start()
    assert shown()["phase"] == "Running", "its key is valid: no second failure"
    stopped = server.post(f"programs/{made['program_id']}/stop", {}).json()

    assert stopped["phase"] == "Stopped"
    phase = "jsonpath={.status.program.phase}=Stopped"
    cluster.wait_for(f"trainingsession/{name}", phase, namespace, SECONDS)
    assert cluster.objects("jobs", namespace) == []
    pods = f"tinkercloud.dev/program={name}"
    assert cluster.objects("pods", namespace, pods) == []
    cluster.delete("trainingsession", name, namespace)
    cluster.wait_for(f"trainingsession/{name}", "delete", namespace, SECONDS)
    secret = session["spec"]["program"]["apiKeySecret"]["name"]
    cluster.wait_for(f"secret/{secret}", "delete", namespace, SECONDS)


def test_a_program_that_is_declared_runs_a_module_of_the_image(
    cluster: Cluster, namespace: str, server: Server
) -> None:
    del server
    program = {
        "module": "tinkercloud_api",
        "args": ["--help"],
        "apiKeySecret": {"name": "research-key"},
    }

    cluster.apply(a_session(namespace, "declared", owner=OWNER, program=program))

    succeeded = "jsonpath={.status.program.phase}=Succeeded"
    cluster.wait_for("trainingsession/declared", succeeded, namespace, SECONDS)
    assert "serve" in cluster.kubectl("logs", "job/declared-program", f"--namespace={namespace}")
    cluster.delete("trainingsession", "declared", namespace)
    cluster.wait_for("job/declared-program", "delete", namespace, SECONDS)
