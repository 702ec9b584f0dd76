"""What a cluster lacks: each obstacle is found, named, and has its remedy."""

from typing import Any

import pytest
import yaml

from tinkercloud_api.cluster_check import platform
from tinkercloud_api.cluster_check.checks import examine
from tinkercloud_api.cluster_check.findings import ClusterFacts, Finding, Level
from tinkercloud_api.cluster_check.values import Release, release_of
from tinkercloud_crds.structural import structural_schema
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_testing.resources.charts import CHART, CRD_CHART, ROOT
from tinkercloud_testing.serving.ready_cluster import (
    a_deployment,
    a_node,
    a_ready_cluster,
    served_schemas,
)

DEFAULTS = release_of([])
VERSION = "0.1.0"


def given(**values: Any) -> Release:
    """Return a release with values, whose images come from a registry."""
    return release_of([{"image": {"registry": "registry.example.com"}, **values}])


def with_model(gpus: int = 0, **placement: Any) -> Release:
    """Return a release with one model."""
    trainer = {"image": "worker", "replicas": 1, "gpusPerReplica": gpus} if gpus else {}
    spec = {
        "modelName": "tiny/llama",
        "source": {"hub": "tiny/llama"},
        "maxContextLength": 128,
        "head": {"image": "worker"},
        "trainer": trainer,
        "placement": placement,
    }
    release = given(baseModels=[{"name": "tiny", "spec": spec}])
    assert release.faults == []
    return release


def bad(facts: ClusterFacts, release: Release = DEFAULTS) -> list[Finding]:
    """Return all results that are not ok."""
    return [each for each in examine(facts, release, VERSION) if each.level is not Level.OK]


def only(facts: ClusterFacts, release: Release = DEFAULTS) -> Finding:
    """Return the only result that is not ok, which must have a remedy."""
    [found] = bad(facts, release)
    assert found.remedy
    return found


def test_a_ready_cluster_has_neither_problems_nor_warnings() -> None:
    assert bad(a_ready_cluster()) == []


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("v1.29.9", Level.PROBLEM, "older than 1.30"),
        ("v1.29.3-gke.1282000", Level.PROBLEM, "older than 1.30"),
        ("v1.40.0", Level.WARNING, "newer than 1.36"),
        ("unknown", Level.WARNING, "unknown version 'unknown'"),
    ],
)
def test_an_unfit_version_of_kubernetes_is_named(version: str, level: Level, words: str) -> None:
    found = only(a_ready_cluster(version=version))

    assert (found.check, found.level) == ("kubernetes", level)
    assert words in found.detail


def test_the_versions_are_those_of_the_charts_and_of_the_tests() -> None:
    for chart in (CHART, CRD_CHART):
        wanted = yaml.safe_load((chart / "Chart.yaml").read_text())["kubeVersion"]
        assert wanted == f">=1.{platform.KUBERNETES_MINIMUM}.0-0"
    pins = (ROOT / "tools" / "cluster" / "kube" / "go.mod").read_text()
    assert f"k8s.io/kubernetes v1.{platform.KUBERNETES_TESTED}." in pins


def test_missing_definitions_are_named_with_the_chart_that_has_them() -> None:
    schemas = served_schemas()
    del schemas["Tenant"]

    found = only(a_ready_cluster(schemas=schemas))

    assert found == Finding(
        "definitions",
        Level.PROBLEM,
        "not installed: Tenant",
        "run `helm upgrade --install tinkercloud-crds` with the chart of this release",
    )


def test_an_older_and_a_newer_definition_differ_by_their_fields() -> None:
    older, newer = served_schemas(), served_schemas()
    del older["Tenant"]["properties"]["spec"]["properties"]["weight"]
    newer["Tenant"]["properties"]["spec"]["properties"]["future"] = {"type": "string"}

    before, after = (only(a_ready_cluster(schemas=each)) for each in (older, newer))

    assert (before.level, after.level) == (Level.PROBLEM, Level.WARNING)
    assert before.detail.endswith("is older than the operator and cannot store spec.weight")
    assert after.detail == "the installed Tenant CRD is newer than 0.1.0: it has spec.future"
    assert "weight" in structural_schema(TenantSpec)["properties"]


def test_a_cluster_without_kuberay_is_a_problem_unless_the_release_brings_it() -> None:
    schemas = served_schemas()
    del schemas["RayCluster"]
    facts = a_ready_cluster(schemas=schemas, operators=[])

    found = only(facts)

    assert (found.check, found.level) == ("kuberay", Level.PROBLEM)
    assert "helm install kuberay-operator" in found.remedy
    assert bad(facts, given(kuberay={"enabled": True})) == []


def test_an_older_kuberay_is_named_with_the_fields_that_it_lacks() -> None:
    schemas = served_schemas()
    spec = {"type": "object", "properties": {"rayVersion": {"type": "string"}}}
    schemas["RayCluster"] = {"properties": {"spec": spec}}

    found = only(a_ready_cluster(schemas=schemas))

    assert "from KubeRay 1.4 or older and lacks spec.authOptions" in found.detail
    assert found.remedy.startswith("upgrade KubeRay")


def test_a_second_kuberay_operator_is_a_problem() -> None:
    found = only(a_ready_cluster(), given(kuberay={"enabled": True}))

    assert found.detail.endswith("runs already: kuberay/kuberay-operator")
    assert found.remedy == "set kuberay.enabled to false"


def test_a_kuberay_that_watches_other_namespaces_or_does_not_run_is_a_problem() -> None:
    operator = a_deployment("kuberay-operator", "kuberay", "operator:v1.6.2")
    [container] = operator["spec"]["template"]["spec"]["containers"]
    container["args"] = ["--watch-namespace=a,b"]
    stopped = {**a_deployment("kuberay-operator", "kuberay", "operator:v1.6.2"), "status": {}}

    elsewhere = only(a_ready_cluster(operators=[operator]))
    not_ready = only(a_ready_cluster(operators=[stopped]))

    assert "watches a, b, and not namespace research" in elsewhere.detail
    assert "no pod that is ready" in not_ready.detail
    container["args"] = ["--watch-namespace=a,research"]
    assert bad(a_ready_cluster(operators=[operator])) == []


def test_a_queue_needs_kueue_and_must_exist_in_the_namespace() -> None:
    release = with_model(queueName="gpus")
    apis = a_ready_cluster().apis
    served = apis | {platform.QUEUES_API}

    missing = only(a_ready_cluster(), release)
    older = only(a_ready_cluster(apis=apis | {"apis/kueue.x-k8s.io/v1beta1"}), release)
    absent = only(a_ready_cluster(apis=served), release)

    assert (missing.level, older.level) == (Level.PROBLEM, Level.WARNING)
    assert "BaseModels name queues: gpus" in missing.detail
    assert absent.remedy == "create the LocalQueue gpus in namespace research"
    queue = {"metadata": {"name": "gpus"}}
    assert bad(a_ready_cluster(apis=served, queues=[queue]), release) == []


def test_nodes_that_cannot_run_the_images_are_found() -> None:
    cordoned, starting = a_node("a"), a_node("b")
    cordoned["spec"] = {"unschedulable": True}
    starting["status"]["conditions"] = []
    arm = a_node("c", labels={"kubernetes.io/arch": "arm64"})

    unusable = only(a_ready_cluster(nodes=[cordoned, starting]))
    other = only(a_ready_cluster(nodes=[arm]))
    mixed = bad(a_ready_cluster(nodes=[arm, a_node()]))
    chosen = {"nodeSelector": {"kubernetes.io/arch": "amd64"}}
    parts = {part: {"scheduling": chosen} for part in ("apiServer", "operator")}

    assert unusable.detail == "none of 2 nodes is ready and takes pods"
    assert other.detail == "1 arm64; the images of a release are for amd64"
    assert [(each.level, each.check) for each in mixed] == [(Level.WARNING, "nodes")]
    assert "apiServer.scheduling, operator.scheduling may run anywhere" in mixed[0].detail
    assert bad(a_ready_cluster(nodes=[arm, a_node()]), given(**parts)) == []


@pytest.mark.parametrize(
    ("nodes", "level", "words"),
    [
        ([a_node()], Level.WARNING, "nodes offer 0 nvidia.com/gpu"),
        ([a_node(gpus=1)], Level.PROBLEM, "nodes offer 1 nvidia.com/gpu, but a session needs"),
        (
            [a_node(labels={"nvidia.com/gpu.present": "true"})],
            Level.PROBLEM,
            "one have GPUs by their labels, but offer no nvidia.com/gpu",
        ),
    ],
)
def test_gpus_that_a_session_needs_and_nodes_do_not_offer_are_counted(
    nodes: list[Any], level: Level, words: str
) -> None:
    found, *_ = bad(a_ready_cluster(nodes=nodes), with_model(gpus=2))

    assert found.check == "gpus"
    assert found.level is level
    assert words in found.detail


@pytest.mark.parametrize(
    "label", ["nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major"]
)
@pytest.mark.parametrize(("major", "is_good"), [("580", True), ("570", False)])
def test_the_driver_of_the_nodes_must_be_new_enough(
    label: str, major: str, *, is_good: bool
) -> None:
    found = bad(a_ready_cluster(nodes=[a_node(gpus=2, labels={label: major})]), with_model(gpus=2))

    assert (found == []) is is_good
    assert is_good or "older than 580 (one: 570)" in found[0].detail


def test_a_driver_that_no_label_shows_is_a_warning() -> None:
    found = only(a_ready_cluster(nodes=[a_node(gpus=2)]), with_model(gpus=2))

    assert (found.check, found.level) == ("driver", Level.WARNING)
    assert "nvidia-smi" in found.remedy


def test_a_taint_of_all_nodes_with_gpus_that_a_model_does_not_tolerate_is_a_warning() -> None:
    driver = {"nvidia.com/cuda.driver.major": "580"}
    nodes = [a_node(gpus=2, taint="sku", labels=driver), a_node("cpu")]

    found = only(a_ready_cluster(nodes=nodes), with_model(gpus=2))

    assert found.detail == "tiny tolerates none of the taints of nodes with GPUs: sku"
    tolerant = with_model(gpus=2, tolerations=[{"key": "sku", "operator": "Exists"}])
    assert bad(a_ready_cluster(nodes=nodes), tolerant) == []
