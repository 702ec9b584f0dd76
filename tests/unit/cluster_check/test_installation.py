"""What the namespace of a release lacks, and how an installed release fails."""

from typing import Any

import pytest
import yaml

from tinkercloud_api.cluster_check import rights
from tinkercloud_api.cluster_check.checks import examine
from tinkercloud_api.cluster_check.findings import ClusterFacts, Finding, Level
from tinkercloud_api.cluster_check.rights import Right
from tinkercloud_api.cluster_check.values import Release, release_of
from tinkercloud_testing.resources.charts import CASES, objects
from tinkercloud_testing.serving.ready_cluster import a_class, a_deployment, a_node, a_ready_cluster

DEFAULTS = release_of([])
VERSION = "0.1.0"
IN_A_STORE = {"database": {"existingSecret": "db"}, "checkpoints": {"root": "s3://bucket/x"}}
DISKS = a_class("disks", "ebs.csi.aws.com", is_default=True)
OURS = {"app.kubernetes.io/part-of": "tinkercloud", "app.kubernetes.io/component": "api"}


def bad(facts: ClusterFacts, release: Release = DEFAULTS) -> list[Finding]:
    """Return all results that are not ok."""
    return [each for each in examine(facts, release, VERSION) if each.level is not Level.OK]


def only(facts: ClusterFacts, release: Release = DEFAULTS) -> Finding:
    """Return the only result that is not ok, which must have a remedy."""
    [found] = bad(facts, release)
    assert found.remedy
    return found


def given(**values: Any) -> Release:
    """Return a release with values, which come from a registry."""
    return release_of([{"image": {"registry": "registry.example.com"}, **values}])


def test_a_namespace_that_does_not_exist_is_created_by_helm() -> None:
    [found] = [
        each for each in examine(a_ready_cluster(namespaces=[]), DEFAULTS, VERSION)
        if each.check == "namespace"
    ]  # fmt: skip

    assert (found.level, found.remedy) == (Level.OK, "add --create-namespace to `helm install`")


def test_a_namespace_that_is_being_deleted_is_a_problem() -> None:
    metadata = {"name": "research", "deletionTimestamp": "2026-01-01T00:00:00Z"}

    assert "being deleted" in only(a_ready_cluster(namespaces=[{"metadata": metadata}])).detail


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (
            {"extraVolumes": [{"name": "data", "hostPath": {"path": "/data"}}]},
            "apiServer.extraVolumes has data, a hostPath",
        ),
        (
            {"extraContainers": [{"name": "proxy", "image": "proxy"}]},
            "the securityContext of proxy in apiServer.extraContainers does not set",
        ),
    ],
)
def test_values_that_a_restricted_namespace_refuses_are_named(
    api: dict[str, Any], words: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"metadata": {"name": "research", "labels": labels}}
    release = given(apiServer=api)

    found = only(a_ready_cluster(namespaces=[namespace]), release)

    assert f"research is restricted, but {words}" in found.detail
    assert bad(a_ready_cluster(), release) == []


def test_permissions_that_the_user_lacks_are_listed_by_resource() -> None:
    denied = frozenset(
        {Right("create", "apps", "deployments"), Right("create", "", "secrets"), *rights.ESCALATION}
    )

    found = only(a_ready_cluster(denied=denied))

    assert found.detail == "you may not create secrets; create deployments.apps"


def test_roles_need_their_own_permissions_unless_the_user_may_escalate() -> None:
    watch = Right("watch", "ray.io", "rayclusters")
    denied = frozenset({watch, *rights.ESCALATION})

    assert only(a_ready_cluster(denied=denied)).detail == "you may not watch rayclusters.ray.io"
    assert bad(a_ready_cluster(denied=frozenset({watch}))) == []


def test_without_cluster_wide_permissions_the_operator_must_not_read_nodes() -> None:
    denied = frozenset(right for right in rights.created(DEFAULTS.values) if right.is_cluster_wide)
    facts = a_ready_cluster(denied=denied)

    assert only(facts).remedy.endswith("set operator.readNodes to false")
    assert bad(facts, given(operator={"readNodes": False})) == []


def test_the_definitions_need_a_permission_only_while_they_are_missing() -> None:
    facts = a_ready_cluster(denied=frozenset({rights.DEFINITIONS}))
    assert bad(facts) == []

    missing = bad(a_ready_cluster(denied=facts.denied, schemas={}))

    assert "create customresourcedefinitions.apiextensions.k8s.io" in missing[-1].detail


def kinds_of(release_rights: list[Right]) -> set[str]:
    return {right.resource.lower() for right in release_rights if right.verb == "create"}


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_permissions_are_those_that_the_rendered_objects_need(case: Any) -> None:
    release = release_of([yaml.safe_load(case.read_text())])
    rendered = objects("--values", str(case))

    needed = {_plural(each["kind"]) for each in rendered}
    rules = {
        (verb, group, resource)
        for each in rendered
        if each["kind"] in {"Role", "ClusterRole"}
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    assert needed <= kinds_of(list(rights.created(release.values)))
    assert rules == {(r.verb, r.group, r.resource) for r in rights.granted(release.values)}


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("policy") else (
        f"{lower}es" if lower.endswith("ss") else f"{lower}s"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "values", "level", "words"),
    [
        ([], {}, Level.PROBLEM, "no default StorageClass"),
        ([DISKS], {}, Level.PROBLEM, "(ebs.csi.aws.com) does not offer ReadWriteMany"),
        (
            [a_class("x", "example.com/x", is_default=True)],
            {},
            Level.WARNING,
            "(example.com/x) may not offer ReadWriteMany",
        ),
        (
            [DISKS],
            {"checkpoints": {"volume": {"storageClassName": "files"}}},
            Level.PROBLEM,
            "checkpoints.volume.storageClassName: the cluster has no StorageClass files",
        ),
    ],
)
def test_a_class_that_cannot_hold_the_volumes_is_named(
    classes: list[Any], values: dict[str, Any], level: Level, words: str
) -> None:
    found = bad(a_ready_cluster(storage_classes=classes), given(**values))

    assert {each.check for each in found} == {"storage"}
    assert found[-1].level is level
    assert words in found[-1].detail


def test_one_node_can_use_a_class_that_one_node_can_mount_and_two_cannot() -> None:
    release = given(checkpoints={"volume": {"accessModes": ["ReadWriteOnce"]}})

    assert bad(a_ready_cluster(storage_classes=[DISKS]), release) == []
    nodes = [a_node("one"), a_node("two")]
    found = only(a_ready_cluster(storage_classes=[DISKS], nodes=nodes), release)
    assert "session pods may run on several nodes" in found.detail


def test_a_claim_that_must_exist_is_looked_for() -> None:
    release = given(
        database={"existingSecret": ""},
        checkpoints={"volume": {"existingClaim": "shared"}},
    )
    claim = {"metadata": {"name": "shared"}, "spec": {"accessModes": ["ReadWriteMany"]}}

    missing = only(a_ready_cluster(), release)
    lost = only(a_ready_cluster(claims=[{**claim, "status": {"phase": "Lost"}}]), release)

    assert missing.detail.endswith("namespace research has no claim shared")
    assert "has lost its volume" in lost.detail
    assert bad(a_ready_cluster(claims=[claim]), release) == []


def test_secrets_that_the_values_name_must_exist_with_their_entries() -> None:
    release = given(**IN_A_STORE)

    missing = only(a_ready_cluster(), release)
    wrong = only(a_ready_cluster(secrets={"db": frozenset({"uri"})}), release)
    unread = only(a_ready_cluster(secrets={"db": None}), release)

    assert missing.detail == "database.existingSecret: namespace research has no Secret db"
    assert wrong.detail.endswith("Secret db has no entry url; it has uri")
    assert unread.level is Level.WARNING
    assert bad(a_ready_cluster(secrets={"db": frozenset({"url"})}), release) == []


def test_a_pull_secret_and_a_bundle_of_authorities_are_checked_too() -> None:
    image = {"registry": "registry.example.com", "pullSecrets": ["registry"]}
    release = release_of([{"image": image, "caBundle": {"configMap": "authorities"}}])
    opaque = {"registry": frozenset({"password"})}

    found = bad(a_ready_cluster(secrets=opaque), release)

    assert ["no entry .dockerconfigjson" in found[0].detail, found[1].remedy] == [
        True,
        "create the ConfigMap authorities before you install the chart",
    ]


def a_pod(reason: str, message: str) -> dict[str, Any]:
    waiting = {"waiting": {"reason": reason, "message": message}}
    return {
        "metadata": {"name": "api-1", "labels": OURS},
        "status": {"containerStatuses": [{"image": "registry/api:1", "state": waiting}]},
    }


@pytest.mark.parametrize(
    ("reason", "message", "words", "remedy"),
    [
        ("ImagePullBackOff", "unauthorized", "ImagePullBackOff: unauthorized", "image.pullSecrets"),
        ("InvalidImageName", "x", "InvalidImageName: x", "image.registry"),
        (
            "ErrImagePull",
            "no match for platform in manifest",
            "not for the architecture of its node",
            "kubernetes.io/arch",
        ),
        (
            "RunContainerError",
            "exec /opt/tinkercloud: exec format error",
            "not for the architecture of its node",
            "kubernetes.io/arch",
        ),
    ],
)
def test_an_image_that_cannot_be_pulled_or_run_is_named_with_its_pod(
    reason: str, message: str, words: str, remedy: str
) -> None:
    found = only(a_ready_cluster(pods=[a_pod(reason, message)]))

    assert (found.check, found.level) == ("images", Level.PROBLEM)
    assert found.detail.startswith("pod api-1: registry/api:1")
    assert words in found.detail
    assert remedy in found.remedy


def test_pods_of_others_in_the_namespace_do_not_count() -> None:
    pod = a_pod("ImagePullBackOff", "unauthorized")
    pod["metadata"]["labels"] = {}

    assert bad(a_ready_cluster(pods=[pod])) == []


def test_an_installed_release_that_does_not_start_says_why() -> None:
    deployment = a_deployment("api", "research", "api", **OURS) | {"status": {}}
    deployment["metadata"]["labels"]["app.kubernetes.io/version"] = VERSION
    pod = {
        "metadata": {"name": "api-1", "labels": OURS},
        "status": {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes are available",
                }
            ]
        },
    }

    found = only(a_ready_cluster(deployments=[deployment], pods=[pod]))

    assert found.detail == "api: no pod is ready (Unschedulable: 0/1 nodes are available)"
    assert "kubectl --namespace research describe pods" in found.remedy


def test_a_release_of_another_version_than_the_command_is_a_warning() -> None:
    labels = {**OURS, "app.kubernetes.io/version": "0.2.0"}
    deployment = a_deployment("api", "research", "api", **labels)

    found = only(a_ready_cluster(deployments=[deployment]))

    assert (found.check, found.level) == ("release", Level.WARNING)
    assert found.detail == "0.2.0 is installed; this command is of 0.1.0"


def test_values_without_a_registry_are_explained_because_the_chart_may_have_one() -> None:
    found = examine(a_ready_cluster(), release_of([{}]), VERSION)

    [images, _] = [each for each in found if each.check == "images"]
    assert images.level is Level.OK
    assert (
        images.remedy
        == "with the chart of a clone, set it, or load tinkercloud-api into every node"
    )


def test_what_the_user_may_not_read_is_a_warning_that_names_it() -> None:
    hidden = (
        "namespaces", "nodes", "storage_classes", "operators", "deployments", "pods", "claims",
    )  # fmt: skip

    found = bad(a_ready_cluster(**dict.fromkeys(hidden)))

    assert {each.level for each in found} == {Level.WARNING}
    assert {each.check for each in found} == {
        *("kuberay", "nodes", "gpus", "namespace", "storage", "images", "release"),
    }
    assert all("not permitted to read" in each.detail for each in found)
