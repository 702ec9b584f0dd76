"""The charts on a real API server: objects are accepted, pods are restricted, keys are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.resources.charts import (
    CASES,
    CHART,
    CRD_CHART,
    ROOT,
    HelmFailed,
    helm,
    pod_specs,
)
from tinkercloud_testing.resources.sessions import a_base_model_manifest, a_session_manifest
from tinkercloud_testing.small_models.models import save, tiny_llama

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
EXAMPLES = sorted((ROOT / "crds" / "examples").glob("*.yaml"))
NAMES = "fullnameOverride=tinker"
HERE = ",".join(
    (
        "httpRoute.enabled=false",
        "metrics.serviceMonitor.enabled=false",
        "metrics.prometheusRule.enabled=false",
        "apiServer.scheduling.priorityClassName=",
    )
)
"""Options without Gateway API, Prometheus operator and class: the test cluster has none."""
every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> None:
    cluster.apply_text(helm("template", "crds", str(CRD_CHART)))
    for plural in ("basemodels", "trainingsessions"):
        cluster.wait_for(f"crd/{plural}.tinkercloud.dev", "condition=Established")


@pytest.fixture
def namespace(cluster: Cluster, definitions: None) -> Iterator[str]:
    with cluster.a_namespace("charts", **RESTRICTED) as name:
        yield name


def rendered(namespace: str, *options: str) -> str:
    return helm("template", "tinker", str(CHART), "--namespace", namespace, *options)


def a_session(name: str, namespace: str, **metadata: object) -> dict[str, object]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"baseModel": "tiny/llama", "owner": "somebody"},
    }


@every_case
def test_the_api_server_accepts_all_objects(cluster: Cluster, namespace: str, case: Path) -> None:
    options = ("--values", str(case), "--set", HERE)

    manifests = rendered(namespace, *options)

    cluster.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=manifests)


@every_case
def test_every_pod_may_run_in_a_restricted_namespace(
    cluster: Cluster, namespace: str, case: Path
) -> None:
    pods: list[dict[str, object]] = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"pod-{number}", "namespace": namespace},
            "spec": {**spec, "restartPolicy": "Always", "serviceAccountName": "default"},
        }
        for number, (_, spec) in enumerate(pod_specs("--values", str(case), "--set", HERE))
    ]

    cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=a_list(pods))


def test_applying_everything_twice_changes_nothing(cluster: Cluster, namespace: str) -> None:
    manifests = rendered(namespace, "--skip-tests", "--no-hooks")

    cluster.apply_text(manifests)

    diff = ("diff", "--server-side", "--force-conflicts", "--field-manager=tests", "-f", "-")
    assert cluster.kubectl(*diff, stdin=manifests) == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_api_server_accepts_the_examples(cluster: Cluster, namespace: str, path: Path) -> None:
    where = f"--namespace={namespace}"

    cluster.kubectl("apply", "--server-side", "--dry-run=server", where, "-f", str(path))


def test_the_api_server_accepts_planned_resources(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    save(tiny_llama(), tmp_path / "tiny")
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "tiny"), "--gpus=8xH100", "--json"])
    where = f"--namespace={namespace}"

    # Fields that the definitions do not know are accepted, but not stored.
    cluster.kubectl("apply", "--server-side", where, "-f", "-", stdin=planned.output)

    spec = cluster.get("basemodel", "tiny", namespace)["spec"]
    assert spec["sampler"]["engines"]["adaptersClaimName"] == "adapters"
    assert spec["sampler"]["image"] == "sglang:v0.5.23"
    assert spec["head"]["resources"] == json.loads(planned.output)["spec"]["head"]["resources"]


def test_the_first_key_survives_upgrades_and_data_survives_the_release(
    cluster: Cluster, namespace: str
) -> None:
    run = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace)
    chart = (str(CHART), "--set", f"{NAMES},operator.readNodes=false")

    helm("install", "tinker", *chart, *run)
    first = cluster.get("secret", "tinker-bootstrap-key", namespace)["data"]["key"]
    helm("upgrade", "tinker", *chart, "--set", "apiServer.logLevel=debug", *run)
    second = cluster.get("secret", "tinker-bootstrap-key", namespace)["data"]["key"]
    helm("uninstall", "tinker", "--no-hooks", *run)

    assert first == second
    assert {each["metadata"]["name"] for each in cluster.objects("pvc", namespace)} == {
        "tinker-catalog",
        "tinker-checkpoints",
    }
    assert cluster.objects("deployments", namespace) == []


def test_a_second_release_in_a_namespace_is_rejected_and_the_first_can_be_upgraded(
    cluster: Cluster, namespace: str
) -> None:
    run = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace)
    alone = "operator.readNodes=false,apiServer.replicas=0,operator.replicas=0"
    chart = (str(CHART), "--set", alone, *run)
    helm("install", "first", *chart)

    with pytest.raises(HelmFailed, match='already contains release "first" of this chart'):
        helm("install", "second", *chart)

    helm("upgrade", "first", *chart)
    helm("uninstall", "first", "--no-hooks", *run)


@pytest.mark.parametrize(
    ("account", "wanted", "is_allowed"),
    [
        ("tinker-api", "create tinkercloud.dev trainingsessions", True),
        ("tinker-api", "get / secrets", True),
        ("tinker-api", "list / secrets", False),
        ("tinker-api", "create / pods", False),
        ("tinker-operator", "patch tinkercloud.dev trainingsessions/status", True),
        ("tinker-operator", "update coordination.k8s.io leases tinker-operator", True),
        ("tinker-operator", "update coordination.k8s.io leases another", False),
        ("tinker-operator", "list / secrets", False),
        ("tinker-session", "get / pods", False),
    ],
)
def test_service_accounts_have_the_rights_of_their_roles(
    cluster: Cluster, namespace: str, account: str, wanted: str, *, is_allowed: bool
) -> None:
    cluster.apply_text(rendered(namespace, "--set", NAMES, "--show-only", "templates/rbac.yaml"))

    review = a_review(f"system:serviceaccount:{namespace}:{account}", namespace, wanted)
    answer = cluster.kubectl("create", "--output=json", "-f", "-", stdin=json.dumps(review))

    assert json.loads(answer)["status"].get("allowed", False) is is_allowed


def test_uninstalling_deletes_sessions_with_the_rights_of_the_operator(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    cluster.apply(a_session("one", namespace), a_session("two", namespace))

    ended = delete_sessions(cluster, namespace, tmp_path, timeout_seconds=30)

    assert ended.returncode == 0, ended.stderr
    assert cluster.objects("trainingsessions", namespace) == []


def test_uninstalling_closes_pools_and_deletes_their_clusters_last(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    shared = a_base_model_manifest("shared", namespace, sharing="Shared")
    run = a_session_manifest("run", namespace, sharing="Shared", modelId="run:train:0")
    run["metadata"]["finalizers"] = ["tinkercloud.dev/last-checkpoint"]
    pool = a_session_manifest("pool-a", namespace, role="Pool", lora=None)
    cluster.apply(shared, run, pool)

    ended = delete_sessions(cluster, namespace, tmp_path, timeout_seconds=2)

    [model] = cluster.objects("basemodels", namespace)
    assert "tinkercloud.dev/pool-closed-until" in model["metadata"]["annotations"]
    assert "sessions not deleted within 2 s: run" in ended.stderr
    found = cluster.get("trainingsession", "pool-a", namespace)["metadata"]
    assert "deletionTimestamp" not in found
    removal = '--patch=[{"op": "remove", "path": "/metadata/finalizers"}]'
    where = (f"--namespace={namespace}", "--type=json")
    cluster.kubectl("patch", "trainingsession/run", *where, removal)
    assert delete_sessions(cluster, namespace, tmp_path, timeout_seconds=30).returncode == 0
    assert cluster.objects("trainingsessions", namespace) == []


def test_uninstalling_fails_and_names_sessions_whose_finalizer_remains(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    held = a_session("held", namespace, finalizers=["tinkercloud.dev/last-checkpoint"])
    cluster.apply(held, a_session("free", namespace))

    ended = delete_sessions(cluster, namespace, tmp_path, timeout_seconds=2)

    assert ended.returncode == 1
    assert "sessions not deleted within 2 s: held" in ended.stderr
    cluster.kubectl(
        "patch",
        "trainingsession/held",
        f"--namespace={namespace}",
        "--type=json",
        '--patch=[{"op": "remove", "path": "/metadata/finalizers"}]',
    )


def delete_sessions(
    cluster: Cluster, namespace: str, folder: Path, *, timeout_seconds: int
) -> subprocess.CompletedProcess[str]:
    """Run the script of the chart's hook like its pod, with the service account of the operator."""
    shown = ("--show-only", "templates/rbac.yaml", "--show-only", "templates/serviceaccounts.yaml")
    cluster.apply_text(rendered(namespace, "--set", NAMES, *shown))
    kubeconfig = cluster.kubeconfig_of("tinker-operator", namespace, folder)
    return subprocess.run(
        [sys.executable, "-c", (CHART / "files" / "delete_sessions.py").read_text()],
        env={
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "NAMESPACE": namespace,
            "TIMEOUT_SECONDS": str(timeout_seconds),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def a_list(items: list[dict[str, object]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def a_review(user: str, namespace: str, wanted: str) -> dict[str, object]:
    """Return an access review of a user for "VERB GROUP RESOURCE[/SUB] [NAME]"."""
    verb, group, resource, *name = wanted.split()
    resource, _, subresource = resource.partition("/")
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user,
            "resourceAttributes": {
                "namespace": namespace,
                "verb": verb,
                "group": group.strip("/"),
                "resource": resource,
                "subresource": subresource,
                "name": "".join(name),
            },
        },
    }
