"""What the cluster must offer: Kubernetes, definitions, KubeRay, Kueue, nodes and GPUs. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tinkercloud_api.cluster_check.findings import ClusterFacts, Finding, Level, not_permitted
from tinkercloud_api.cluster_check.values import Release
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.served_schemas import KUBERAY_MINIMUM, kuberay_gap, own_gap, own_surplus
from tinkercloud_kube.objects import Manifest

OWN_KINDS = ("BaseModel", "TrainingSession", "Tenant")
KUBERNETES_MINIMUM = 30
"""Oldest minor version of Kubernetes 1, as in `kubeVersion` of the charts."""
KUBERNETES_TESTED = 36
"""Minor version that the tests run."""
KUBERAY_OPERATOR_LABEL = "app.kubernetes.io/name=kuberay-operator"
DRIVER_MINIMUM = 580
"""Oldest major version of NVIDIA's driver for the CUDA of the worker image."""
ARCHITECTURES = frozenset({"amd64"})
"""Architectures of the images of a release."""
QUEUES_API = "apis/kueue.x-k8s.io/v1beta2"
_KUEUE = "apis/kueue.x-k8s.io/"
_GPU = "nvidia.com/gpu"
_ARCHITECTURE_LABEL = "kubernetes.io/arch"
_DRIVER_LABELS = ("nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major")
"""Labels of NVIDIA's GPU feature discovery: current and older."""
_ACCELERATOR_LABELS = (
    "nvidia.com/gpu.present",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "eks.amazonaws.com/instance-gpu-manufacturer",
    "kubernetes.azure.com/accelerator",
)
"""Labels of nodes with GPUs, whether or not they offer them to pods."""
_INSTALL_CRDS = "run `helm upgrade --install tinkercloud-crds` with the chart of this release"
_INSTALL_KUBERAY = (
    "run `helm install kuberay-operator kuberay-operator --repo"
    " https://ray-project.github.io/kuberay-helm/ --version 1.6.2 --namespace kuberay"
    " --create-namespace`, or set kuberay.enabled"
)


def check_kubernetes(facts: ClusterFacts) -> Iterator[Finding]:
    """Check the version of Kubernetes."""
    check = "kubernetes"
    match = re.match(r"v?1\.(\d+)", facts.version)
    if match is None:
        remedy = f"use Kubernetes 1.{KUBERNETES_MINIMUM} or newer"
        yield Finding(check, Level.WARNING, f"unknown version {facts.version!r}", remedy)
        return
    minor = int(match[1])
    if minor < KUBERNETES_MINIMUM:
        detail = f"{facts.version} is older than 1.{KUBERNETES_MINIMUM}, which the charts require"
        remedy = f"upgrade the cluster to 1.{KUBERNETES_MINIMUM} or newer"
        yield Finding(check, Level.PROBLEM, detail, remedy)
    elif minor > KUBERNETES_TESTED:
        detail = f"{facts.version} is newer than 1.{KUBERNETES_TESTED}, with which the tests run"
        remedy = "read the notes of newer releases of Tinkercloud, and try it on a test cluster"
        yield Finding(check, Level.WARNING, detail, remedy)
    else:
        yield Finding(check, Level.OK, facts.version)


def check_definitions(facts: ClusterFacts, version: str) -> Iterator[Finding]:
    """Check the custom resource definitions of Tinkercloud.

    Args:
        facts: what was read.
        version: version of this command.
    """
    check = "definitions"
    missing = [kind for kind in OWN_KINDS if kind not in facts.schemas]
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        yield Finding(check, Level.PROBLEM, detail, _INSTALL_CRDS)
    served = {kind: facts.schemas[kind] for kind in OWN_KINDS if kind in facts.schemas}
    gaps = {kind: own_gap(kind, schema) for kind, schema in served.items()}
    for gap in filter(None, gaps.values()):
        yield Finding(check, Level.PROBLEM, gap.partition("; ")[0], _INSTALL_CRDS)
    surplus = {kind: own_surplus(kind, schema) for kind, schema in served.items()}
    for kind, fields in surplus.items():
        if fields is not None and gaps[kind] is None:
            detail = f"the installed {kind} CRD is newer than {version}: it has {fields}"
            remedy = "use the charts and the command of that newer release"
            yield Finding(check, Level.WARNING, detail, remedy)
    if not missing and not any(gaps.values()) and not any(surplus.values()):
        yield Finding(check, Level.OK, f"{', '.join(OWN_KINDS)} of {version}")


def check_kuberay(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check KubeRay's definitions and its operator."""
    check = "kuberay"
    if release.values["kuberay"]["enabled"]:
        yield _included_kuberay(facts)
        return
    schema = facts.schemas.get("RayCluster")
    if schema is None:
        detail = "not installed: there is no definition of RayClusters"
        yield Finding(check, Level.PROBLEM, detail, _INSTALL_KUBERAY)
        return
    gap = kuberay_gap(schema)
    if gap is not None:
        detail, _, remedy = gap.partition("; ")
        yield Finding(check, Level.PROBLEM, detail, remedy)
        return
    if facts.operators is None:
        yield not_permitted(check, "the Deployments of all namespaces")
    elif not facts.operators:
        detail = f"RayClusters are defined, but no Deployment has {KUBERAY_OPERATOR_LABEL}"
        remedy = "check that KubeRay's operator runs; a cloud's add-on may run it elsewhere"
        yield Finding(check, Level.WARNING, detail, remedy)
    else:
        yield from (_operator(each, facts.namespace) for each in facts.operators)


def _included_kuberay(facts: ClusterFacts) -> Finding:
    others = [
        f"{each['metadata']['namespace']}/{each['metadata']['name']}"
        for each in facts.operators or []
        if each["metadata"]["namespace"] != facts.namespace
    ]
    if others:
        detail = f"kuberay.enabled, but KubeRay's operator runs already: {', '.join(others)}"
        return Finding("kuberay", Level.PROBLEM, detail, "set kuberay.enabled to false")
    return Finding("kuberay", Level.OK, "part of the release (kuberay.enabled)")


def _operator(deployment: Manifest, namespace: str) -> Finding:
    metadata = deployment["metadata"]
    [container, *_] = deployment["spec"]["template"]["spec"]["containers"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    watched = [
        argument.partition("=")[2].split(",")
        for argument in container.get("args", [])
        if argument.startswith("--watch-namespace=")
    ]
    if any(namespace not in names for names in watched):
        detail = f"{name} watches {', '.join(watched[0])}, and not namespace {namespace}"
        remedy = f"add {namespace} to watchNamespace in the values of KubeRay's chart"
        return Finding("kuberay", Level.PROBLEM, detail, remedy)
    if not deployment.get("status", {}).get("availableReplicas"):
        detail = f"{name} has no pod that is ready"
        remedy = f"see `kubectl --namespace {metadata['namespace']} describe pods`"
        return Finding("kuberay", Level.PROBLEM, detail, remedy)
    version = container["image"].rpartition("/")[2].partition("@")[0]
    detail = f"{name} runs {version}; sessions need {KUBERAY_MINIMUM} or newer"
    return Finding("kuberay", Level.OK, detail)


def check_kueue(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check Kueue and the queues that the BaseModels of the values name."""
    check = "kueue"
    versions = [api.removeprefix(_KUEUE) for api in sorted(facts.apis) if api.startswith(_KUEUE)]
    wanted: dict[str, str] = {}
    for name, model in release.models.items():
        for queue in (model.placement.queue_name, *model.sessions.queue_names):
            if queue is not None:
                wanted.setdefault(queue, name)
    if not wanted:
        found = f"installed ({', '.join(versions)})" if versions else "not installed"
        yield Finding(check, Level.OK, f"{found}; no BaseModel of the values names a queue")
    elif not versions:
        detail = f"not installed, but BaseModels name queues: {', '.join(sorted(wanted))}"
        remedy = "install Kueue, or remove placement.queueName from the BaseModels"
        yield Finding(check, Level.PROBLEM, detail, remedy)
    elif QUEUES_API not in facts.apis:
        detail = f"serves {', '.join(versions)} only, so queues were not checked"
        remedy = "upgrade Kueue to a version that serves v1beta2; the tests run 0.19"
        yield Finding(check, Level.WARNING, detail, remedy)
    elif facts.queues is None:
        yield not_permitted(check, "LocalQueues")
    else:
        yield from _queues(facts, wanted)


def _queues(facts: ClusterFacts, wanted: Mapping[str, str]) -> Iterator[Finding]:
    existing = {each["metadata"]["name"] for each in facts.queues or []}
    missing = sorted(wanted.keys() - existing)
    for queue in missing:
        detail = (
            f"namespace {facts.namespace} has no LocalQueue {queue}, which {wanted[queue]} names"
        )
        remedy = f"create the LocalQueue {queue} in namespace {facts.namespace}"
        yield Finding("kueue", Level.PROBLEM, detail, remedy)
    if not missing:
        yield Finding("kueue", Level.OK, f"LocalQueues {', '.join(sorted(wanted))}")


def usable_nodes(facts: ClusterFacts) -> Sequence[Manifest]:
    """Return the nodes that are ready and take new pods."""
    return [node for node in facts.nodes or [] if _is_usable(node)]


def _is_usable(node: Manifest) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_ready and not node.get("spec", {}).get("unschedulable")


def check_nodes(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check that there are nodes on which the images run."""
    check = "nodes"
    if facts.nodes is None:
        yield not_permitted(check, "nodes")
        return
    nodes = usable_nodes(facts)
    if not nodes:
        detail = f"none of {len(facts.nodes)} nodes is ready and takes pods"
        yield Finding(check, Level.PROBLEM, detail, "see `kubectl describe nodes`")
        return
    counts = Counter(_labels(node).get(_ARCHITECTURE_LABEL, "unknown") for node in nodes)
    shown = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    wanted = " or ".join(sorted(ARCHITECTURES))
    if not ARCHITECTURES & counts.keys():
        remedy = f"add a node pool of {wanted}, or build the images for these nodes"
        detail = f"{shown}; the images of a release are for {wanted}"
        yield Finding(check, Level.PROBLEM, detail, remedy)
    elif counts.keys() - ARCHITECTURES and (open_ := _without_architecture(release)):
        detail = f"{shown}; the images are for {wanted}, and {', '.join(open_)} may run anywhere"
        remedy = f"set {_ARCHITECTURE_LABEL}: {wanted} in the nodeSelector of each"
        yield Finding(check, Level.WARNING, detail, remedy)
    else:
        yield Finding(check, Level.OK, shown)


def _without_architecture(release: Release) -> Sequence[str]:
    """Return the fields of node selectors that admit nodes of any architecture."""
    selectors = {
        f"{part}.scheduling": release.values[part]["scheduling"]["nodeSelector"] or {}
        for part in ("apiServer", "operator")
    } | {
        f"the BaseModel {name} (placement)": model.placement.node_selector
        for name, model in release.models.items()
    }
    return [name for name, selector in selectors.items() if _ARCHITECTURE_LABEL not in selector]


def check_gpus(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check that the cluster offers the GPUs that the BaseModels of the values request."""
    if facts.nodes is None:
        yield not_permitted("gpus", "nodes")
        return
    needed = {name: gpus for name, model in release.models.items() if (gpus := _gpus_of(model))}
    offering = [node for node in facts.nodes if _offered(node)]
    silent = [
        node["metadata"]["name"]
        for node in facts.nodes
        if not _offered(node) and any(label in _labels(node) for label in _ACCELERATOR_LABELS)
    ]
    if silent:
        detail = f"{', '.join(silent)} have GPUs by their labels, but offer no {_GPU}"
        remedy = "install NVIDIA's device plugin or GPU operator, and see its pods on these nodes"
        yield Finding("gpus", Level.PROBLEM, detail, remedy)
    total = sum(map(_offered, offering))
    most = max(needed.values(), default=0)
    if total >= most:
        yield Finding("gpus", Level.OK, _offer(offering, total, needed))
    elif not silent:
        names = ", ".join(f"{name}: {gpus}" for name, gpus in sorted(needed.items()))
        detail = f"nodes offer {total} {_GPU}, but a session needs more ({names})"
        remedy = "add nodes with GPUs, or choose BaseModels that fit"
        # An autoscaler may add them when the first pod asks.
        yield Finding("gpus", Level.WARNING if not offering else Level.PROBLEM, detail, remedy)
    if offering:
        yield from _drivers(offering)
    yield from _taints(offering, release)


def _offer(offering: Sequence[Manifest], total: int, needed: Mapping[str, int]) -> str:
    if not offering:
        return f"no node offers {_GPU}; no BaseModel of the values requests any"
    most = f"; a session needs up to {max(needed.values())}" if needed else ""
    return f"{total} {_GPU} on {len(offering)} nodes{most}"


def _drivers(offering: Sequence[Manifest]) -> Iterator[Finding]:
    versions = {node["metadata"]["name"]: _driver(node) for node in offering}
    old = {name: major for name, major in versions.items() if major and major < DRIVER_MINIMUM}
    unknown = [name for name, major in versions.items() if major is None]
    if old:
        shown = ", ".join(f"{name}: {major}" for name, major in sorted(old.items()))
        detail = f"NVIDIA's driver is older than {DRIVER_MINIMUM} ({shown})"
        remedy = f"upgrade the driver of these nodes to {DRIVER_MINIMUM} or newer, for CUDA 13"
        yield Finding("driver", Level.PROBLEM, detail, remedy)
    if unknown:
        detail = f"no label shows the version of NVIDIA's driver on {', '.join(sorted(unknown))}"
        remedy = f"run `nvidia-smi` in a pod there: it must show {DRIVER_MINIMUM} or newer"
        yield Finding("driver", Level.WARNING, detail, remedy)
    if not old and not unknown:
        majors = ", ".join(sorted({str(major) for major in versions.values()}))
        yield Finding("driver", Level.OK, f"NVIDIA's driver {majors}")


def _taints(offering: Sequence[Manifest], release: Release) -> Iterator[Finding]:
    """Yield the models that tolerate the taints of no node with GPUs."""
    taints = [
        {
            taint["key"]
            for taint in node.get("spec", {}).get("taints", [])
            if taint["effect"] in {"NoSchedule", "NoExecute"}
        }
        for node in offering
    ]
    for name, model in release.models.items():
        if not _gpus_of(model) or not taints:
            continue
        tolerations = model.placement.of_role(model.trainer.placement).tolerations
        tolerated = {each.key for each in tolerations}
        if None in tolerated or any(keys <= tolerated for keys in taints):
            continue
        keys = ", ".join(sorted(set().union(*taints) - tolerated))
        detail = f"{name} tolerates none of the taints of nodes with GPUs: {keys}"
        remedy = f"add a toleration to placement.tolerations of {name}, unless the cloud does"
        yield Finding("gpus", Level.WARNING, detail, remedy)


def _gpus_of(model: BaseModelSpec) -> int:
    trainer, sampler = model.trainer, model.sampler
    samplers = 0 if sampler.colocated else sampler.replicas * sampler.gpus_per_replica
    return trainer.replicas * trainer.gpus_per_replica + samplers


def _offered(node: Manifest) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(_GPU, "0"))


def _driver(node: Manifest) -> int | None:
    found = next((_labels(node)[each] for each in _DRIVER_LABELS if each in _labels(node)), "")
    return int(found) if found.isdigit() else None


def _labels(node: Manifest) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels
