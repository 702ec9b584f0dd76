"""`tinkercloud cluster check` on a real API server: each obstacle, and what Helm says about it.

The tests depend on each other: each removes one more obstacle of an empty cluster.
"""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_crds.generate import KINDS, definition
from tinkercloud_testing.cluster.controllers.kuberay import install_definitions as install_kuberay
from tinkercloud_testing.cluster.controllers.older_kuberay import install_older_definition
from tinkercloud_testing.cluster.image_build.programs import binary
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.kube_api.existing import existing_cluster
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.charts import CHART, CRD_CHART, ROOT, HelmFailed, helm

pytestmark = pytest.mark.skipif(
    existing_cluster() is not None, reason="needs a cluster that lacks everything"
)
PAGE = (ROOT / "docs" / "operate" / "quickstart.md").read_text()
NAMESPACE = "research"
INSTALLED = "tinkercloud"
"""The namespace of the quickstart page."""
STOPPED = (
    "apiServer.replicas=0,operator.replicas=0,database.volume.retain=false"
    ",checkpoints.volume.retain=false"
)
Row = dict[str, str]
Manifest = dict[str, Any]
QUEUES = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "localqueues.kueue.x-k8s.io"},
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "LocalQueue", "plural": "localqueues"},
        "versions": [
            {
                "name": "v1beta2",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
"""The API of Kueue's queues, of which the check reads nothing but names."""


@pytest.fixture(scope="module")
def empty(cluster_folder: Path) -> Iterator[Cluster]:
    """Run a control plane without nodes, definitions and classes."""
    folder = cluster_folder / "check"
    with a_control_plane(folder) as plane:
        yield plane.cluster


def check(kubeconfig: Path, *options: str, namespace: str = NAMESPACE) -> tuple[int, list[Row]]:
    """Run the command and return its exit status and its results."""
    arguments = ["cluster", "check", "--json", f"--namespace={namespace}", *options]
    environment = {"KUBECONFIG": str(kubeconfig)}
    result = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
    rows: list[Row] = json.loads(result.stdout)
    return result.exit_code, rows


def problems(rows: list[Row]) -> dict[str, str]:
    """Return detail and remedy of the last problem of each check."""
    return {
        row["check"]: f"{row['detail']} -> {row['remedy']}"
        for row in rows
        if row["result"] == "problem"
    }


def of(rows: list[Row], name: str) -> Row:
    """Return the first result of a check."""
    return next(row for row in rows if row["check"] == name)


def result_with(cluster: Cluster, words: str, *options: str) -> Row:
    """Wait for a result with these words, and return it: new definitions are served with delay."""
    found: list[Row] = []

    def is_there() -> bool:
        found[:] = [row for row in check(cluster.kubeconfig, *options)[1] if words in row["detail"]]
        return bool(found)

    wait_until(is_there, f"a result with {words!r}")
    return found[0]


def a_node(name: str, **labels: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def a_storage_class(name: str, provisioner: str, *, is_default: bool) -> Manifest:
    annotations = {"storageclass.kubernetes.io/is-default-class": str(is_default).lower()}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
    }


def a_namespace(**labels: str) -> Manifest:
    metadata = {"name": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def run_helm(cluster: Path, *arguments: str) -> str:
    return helm(*arguments, f"--kubeconfig={cluster}", f"--namespace={NAMESPACE}")


def test_an_empty_cluster_lacks_definitions_kuberay_nodes_and_a_storage_class(
    empty: Cluster,
) -> None:
    status, rows = check(empty.kubeconfig)

    found = problems(rows)
    assert status == 1
    assert found.keys() == {"definitions", "kuberay", "nodes", "storage"}
    assert "BaseModel, TrainingSession, Tenant -> run `helm upgrade" in found["definitions"]
    assert "not installed" in found["kuberay"]
    assert "none of 0 nodes" in found["nodes"]
    assert "no default StorageClass -> set" in found["storage"]
    assert of(rows, "kubernetes")["result"] == "ok"
    assert "does not exist" in of(rows, "namespace")["detail"]
    assert of(rows, "permissions")["result"] == "ok"


def test_helm_refuses_the_chart_without_definitions_and_says_what_is_first(
    empty: Cluster,
) -> None:
    empty.apply(a_namespace())

    with pytest.raises(HelmFailed, match="no definition of BaseModel: first install the chart"):
        run_helm(empty.kubeconfig, "install", "tinker", str(CHART), f"--set={STOPPED}")

    assert run_helm(empty.kubeconfig, "list", "--short").strip() == ""


def test_an_older_definition_is_named_with_the_fields_that_it_lacks(empty: Cluster) -> None:
    older = [copy.deepcopy(definition(kind)) for kind in KINDS]
    [tenant] = [each for each in older if each["spec"]["names"]["kind"] == "Tenant"]
    [version] = tenant["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["weight"]
    empty.apply(*older)
    for each in older:
        empty.wait_until_established(each["metadata"]["name"])

    found = result_with(empty, "Tenant CRD is older")

    assert (found["check"], found["result"]) == ("definitions", "problem")
    assert found["detail"].endswith("cannot store spec.weight")
    assert found["remedy"].startswith("run `helm upgrade --install tinkercloud-crds`")


def test_the_chart_of_the_definitions_updates_them_and_a_newer_one_is_a_warning(
    empty: Cluster,
) -> None:
    helm(
        *("upgrade", "--install", "tinkercloud-crds", str(CRD_CHART)),
        *("--take-ownership", "--force-conflicts", f"--kubeconfig={empty.kubeconfig}"),
    )
    assert result_with(empty, "BaseModel, TrainingSession, Tenant of")["result"] == "ok"

    [tenant] = [definition(each) for each in KINDS if each.kind == "Tenant"]
    newer = copy.deepcopy(tenant)
    [version] = newer["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["fromTheFuture"] = {"type": "string"}
    empty.apply(newer)
    found = result_with(empty, "Tenant CRD is newer")
    empty.apply(tenant)

    assert found["result"] == "warning"
    assert "spec.fromTheFuture" in found["detail"]
    result_with(empty, "BaseModel, TrainingSession, Tenant of")


def test_an_older_kuberay_and_one_without_an_operator_are_found(empty: Cluster) -> None:
    install_older_definition(empty, "v1.4.2")
    assert result_with(empty, "is from KubeRay 1.4 or older")["result"] == "problem"

    install_kuberay(empty)

    found = result_with(empty, "no Deployment has app.kubernetes.io/name=kuberay-operator")
    assert (found["check"], found["result"]) == ("kuberay", "warning")


def test_a_user_without_permissions_is_not_blocked_by_what_the_check_cannot_read(
    empty: Cluster, tmp_path: Path
) -> None:
    empty.kubectl("create", "serviceaccount", "nobody", f"--namespace={NAMESPACE}")
    nobody = empty.kubeconfig_of("nobody", NAMESPACE, tmp_path)

    status, rows = check(nobody)

    assert status == 1
    assert problems(rows).keys() == {"permissions"}
    assert "create deployments.apps" in problems(rows)["permissions"]
    unread = {row["check"] for row in rows if row["detail"].startswith("not permitted")}
    assert unread == {
        *("kuberay", "nodes", "gpus", "namespace", "storage", "images", "release"),
    }


def test_the_verdict_on_permissions_is_that_of_helm(empty: Cluster, tmp_path: Path) -> None:
    where = f"--namespace={NAMESPACE}"
    empty.kubectl("create", "serviceaccount", "owner", where)
    account = f"--serviceaccount={NAMESPACE}:owner"
    empty.kubectl("create", "rolebinding", "owner", "--clusterrole=admin", account, where)
    owner = empty.kubeconfig_of("owner", NAMESPACE, tmp_path)
    values = tmp_path / "values.yaml"
    values.write_text("operator: {readNodes: false}\n")
    install = ("install", "tinker", str(CHART), f"--set={STOPPED}", f"--values={values}")

    _, rows = check(owner, f"--values={values}")
    refused = problems(rows)["permissions"]
    with pytest.raises(HelmFailed, match="attempting to grant RBAC permissions not currently held"):
        run_helm(owner, *install)
    empty.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "installer", "namespace": NAMESPACE},
            "rules": missing_rules(refused),
        }
    )
    empty.kubectl("create", "rolebinding", "installer", "--role=installer", account, where)
    _, rows = check(owner, f"--values={values}")

    assert "create, delete, list, patch, watch rayclusters.ray.io" in refused
    assert "clusterroles" not in refused
    assert "clusterroles.rbac.authorization.k8s.io" in problems(check(owner)[1])["permissions"]
    assert of(rows, "permissions")["result"] == "ok"
    run_helm(owner, "upgrade", "--install", *install[1:])
    run_helm(empty.kubeconfig, "uninstall", "tinker", "--no-hooks")


def missing_rules(detail: str) -> list[Manifest]:
    """Return the rules of a Role with the permissions that a result names."""
    rules = []
    for part in detail.partition(" -> ")[0].removeprefix("you may not ").split("; "):
        verbs, _, plural = part.rpartition(" ")
        resource, _, group = plural.partition(".")
        group, _, subresource = group.partition("/")
        name = f"{resource}/{subresource}" if subresource else resource
        rules.append({"apiGroups": [group], "resources": [name], "verbs": verbs.split(", ")})
    return rules


def test_nodes_of_another_architecture_and_gpus_that_are_not_offered_are_found(
    empty: Cluster,
) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    labels = {"kubernetes.io/arch": "arm64", "nvidia.com/gpu.present": "true"}
    empty.apply(a_node("one", **labels))
    empty.patch_status("node", "one", ready)

    _, rows = check(empty.kubeconfig)

    assert "1 arm64; the images of a release are for amd64" in problems(rows)["nodes"]
    assert "one have GPUs by their labels, but offer no nvidia.com/gpu" in problems(rows)["gpus"]
    labels["kubernetes.io/arch"] = "amd64"
    labels["nvidia.com/cuda.driver-version.major"] = "570"
    empty.apply(a_node("one", **labels))
    empty.patch_status("node", "one", ready | {"allocatable": {"nvidia.com/gpu": "8"}})
    _, rows = check(empty.kubeconfig)
    assert "older than 580 (one: 570)" in problems(rows)["driver"]
    empty.apply(a_node("one", **{"kubernetes.io/arch": "amd64"}))
    empty.patch_status("node", "one", {"allocatable": {"nvidia.com/gpu": None}})


def test_a_class_that_one_node_can_mount_and_a_missing_one_are_found(
    empty: Cluster, tmp_path: Path
) -> None:
    empty.apply(a_storage_class("disks", "ebs.csi.aws.com", is_default=True))
    _, rows = check(empty.kubeconfig)
    assert "does not offer ReadWriteMany" in problems(rows)["storage"]

    values = tmp_path / "values.yaml"
    values.write_text("checkpoints: {volume: {storageClassName: files}}\n")
    _, rows = check(empty.kubeconfig, f"--values={values}")
    assert "no StorageClass files -> set it to one of disks" in problems(rows)["storage"]

    empty.apply(a_storage_class("files", "efs.csi.aws.com", is_default=False))
    _, rows = check(empty.kubeconfig, f"--values={values}")
    assert "storage" not in problems(rows)


def test_values_of_another_release_and_objects_that_they_name_are_checked(
    empty: Cluster, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    model = yaml.safe_load(
        """
        name: tiny
        spec:
          modelName: tiny/llama
          source: {volume: {claimName: models, path: tiny}}
          maxContextLength: 128
          head: {image: worker}
          placement: {queueName: gpus}
        """
    )
    values.write_text(
        yaml.safe_dump(
            {
                "apiServer": {"replicaCount": 2},
                "image": {"registry": "registry.example.com", "pullSecrets": ["registry"]},
                "database": {"existingSecret": "database"},
                "checkpoints": {"root": "s3://bucket/x"},
                "baseModels": [model],
            }
        )
    )
    wrong = "--from-literal=uri=postgresql"
    where = f"--namespace={NAMESPACE}"
    empty.kubectl("create", "secret", "generic", "database", wrong, where)
    empty.apply(QUEUES)
    result_with(empty, "has no LocalQueue gpus, which tiny names", f"--values={values}")

    status, rows = check(empty.kubeconfig, f"--values={values}")

    details = [row["detail"] for row in rows if row["result"] == "problem"]
    assert status == 1
    assert any("apiServer.replicaCount: the chart of this release" in each for each in details)
    assert any("has no entry url; it has uri" in each for each in details)
    assert any("has no Secret registry" in each for each in details)
    assert any("has no claim models" in each for each in details)


def test_a_restricted_namespace_refuses_volumes_of_the_host(empty: Cluster, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("apiServer: {extraVolumes: [{name: data, hostPath: {path: /data}}]}\n")
    empty.apply(a_namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}))

    _, rows = check(empty.kubeconfig, f"--values={values}")

    assert "restricted, but apiServer.extraVolumes has data, a hostPath" in str(problems(rows))
    assert of(check(empty.kubeconfig)[1], "namespace")["result"] == "ok"


def run_page(title: str, cluster: Cluster, folder: Path) -> str:
    """Run the commands of a section of the quickstart page; return all that they print.

    The charts are those of this repository instead of a registry's.
    """
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    script = "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    script = script.replace("oci://ghcr.io/OWNER/charts/", f"{ROOT}/charts/")
    programs = {str(binary(name).parent) for name in ("helm", "kubectl")}
    path = ":".join([*programs, str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        ["/bin/sh", "-eu"],
        input=script.replace(" --version 0.1.0", ""),
        env={**os.environ, "PATH": path, "KUBECONFIG": str(cluster.kubeconfig)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_kuberay(cluster: Cluster) -> None:
    """Create KubeRay's Deployment, as its chart does, with a pod that is ready."""
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    container = {"name": "kuberay-operator", "image": "quay.io/kuberay/operator:v1.6.2"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kuberay"}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "kuberay-operator", "namespace": "kuberay", "labels": labels},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        },
    )
    pod = first_pod(cluster, "app.kubernetes.io/name=kuberay-operator", "kuberay")
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    cluster.patch_status("pod", pod, ready, "kuberay")
    cluster.wait_for("deployment/kuberay-operator", "condition=Available", "kuberay")


def first_pod(cluster: Cluster, selector: str, namespace: str) -> str:
    """Wait for a pod with some labels, and return its name."""
    wait_until(lambda: bool(cluster.objects("pods", namespace, selector)), "a pod")
    pod, *_ = cluster.objects("pods", namespace, selector)
    return str(pod["metadata"]["name"])


def test_the_quickstart_page_checks_and_installs_what_its_commands_say(
    empty: Cluster, tmp_path: Path
) -> None:
    run_kuberay(empty)
    empty.delete("storageclass", "disks")
    empty.apply(a_storage_class("standard", "rancher.io/local-path", is_default=True))
    (tmp_path / "values.yaml").write_text((CHART / "examples" / "laptop-kind.yaml").read_text())

    printed = run_page("Installation", empty, tmp_path)

    results = re.compile(r"^(ok|warning|problem) +\w+: ", re.M)
    assert results.findall(printed) == results.findall(PAGE)
    documented = [line for line in PAGE.splitlines() if results.match(line)]
    varying = ("cluster:", "kueue:")
    for line in documented:
        assert line in printed or any(word in line for word in varying), line
    for line in ("deployment.apps/tinkercloud-api", "basemodel.tinkercloud.dev/smollm2-135m"):
        assert line in printed


def test_an_installation_whose_images_are_not_pulled_says_which_and_what_to_do(
    empty: Cluster,
) -> None:
    pod = first_pod(empty, "app.kubernetes.io/component=operator", INSTALLED)
    waiting = {"reason": "ImagePullBackOff", "message": "pull access denied"}
    container = {
        "name": "operator",
        "image": "tinkercloud-operator:0.1.0",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    empty.patch_status("pod", pod, {"containerStatuses": [container]}, INSTALLED)

    status, rows = check(empty.kubeconfig, namespace=INSTALLED)

    assert status == 1
    assert {"images", "release"} <= problems(rows).keys()
    assert "tinkercloud-operator:0.1.0: ImagePullBackOff: pull access denied" in str(rows)
    assert "image.pullSecrets" in problems(rows)["images"]
    assert "no pod is ready" in problems(rows)["release"]


def test_uninstalling_both_charts_leaves_the_definitions_and_the_volumes_only(
    empty: Cluster,
) -> None:
    # The hook that ends sessions needs a node that runs pods.
    where = (f"--kubeconfig={empty.kubeconfig}", f"--namespace={INSTALLED}")
    helm("uninstall", "tinkercloud", "--no-hooks", *where)
    helm("uninstall", "tinkercloud-crds", f"--kubeconfig={empty.kubeconfig}")

    everywhere = "crd,clusterrole,clusterrolebinding"
    names = empty.kubectl("get", everywhere, "--output=name").split()
    left = [name for name in names if "tinker" in name]
    assert left == [
        f"customresourcedefinition.apiextensions.k8s.io/{plural}.tinkercloud.dev"
        for plural in ("basemodels", "tenants", "trainingsessions")
    ]
    claims = {each["metadata"]["name"] for each in empty.objects("pvc", INSTALLED)}
    assert claims == {"tinkercloud-catalog", "tinkercloud-checkpoints"}
    kinds = (
        "deployment,service,secret,role,rolebinding,lease,networkpolicy,pdb,serviceaccount"
        ",basemodel,trainingsession,tenant"
    )
    selector = "--selector=app.kubernetes.io/part-of=tinkercloud"
    namespaced = (f"--namespace={INSTALLED}", selector, "--output=name")
    assert empty.kubectl("get", kinds, *namespaced) == ""
