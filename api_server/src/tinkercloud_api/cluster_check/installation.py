"""What the namespace and the values of a release must be like, and how the release is: pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinkercloud_api.cluster_check import needs, rights
from tinkercloud_api.cluster_check.findings import ClusterFacts, Finding, Level, not_permitted
from tinkercloud_api.cluster_check.platform import OWN_KINDS, usable_nodes
from tinkercloud_api.cluster_check.values import Release
from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest

_ENFORCE = "pod-security.kubernetes.io/enforce"
_RESTRICTED_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
"""Kinds of volumes that the Pod Security level `restricted` admits."""
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_ONE_NODE = (
    "ebs.csi.aws.com",
    "ebs.csi.eks.amazonaws.com",
    "kubernetes.io/aws-ebs",
    "pd.csi.storage.gke.io",
    "kubernetes.io/gce-pd",
    "disk.csi.azure.com",
    "kubernetes.io/azure-disk",
    "rancher.io/local-path",
    "rbd.csi.ceph.com",
)
"""Suffixes of provisioners that support ReadWriteOnce only."""
_MANY_NODES = (
    "efs.csi.aws.com",
    "fsx.csi.aws.com",
    "filestore.csi.storage.gke.io",
    "file.csi.azure.com",
    "nfs.csi.k8s.io",
    "cephfs.csi.ceph.com",
    "driver.longhorn.io",
)
"""Suffixes of provisioners that support ReadWriteMany."""
_USE_A_STORE = "or keep checkpoints in an object store (checkpoints.root)"
_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName"})
_OTHER_ARCHITECTURE = ("exec format error", "no match for platform", "no matching manifest")
"""Words of container runtimes about an image of another architecture."""
_PART_OF = "app.kubernetes.io/part-of"
_COMPONENT = "app.kubernetes.io/component"


def check_values(release: Release, version: str) -> Iterator[Finding]:
    """Report the values that the chart of this release refuses.

    Args:
        release: the values.
        version: version of this command, whose chart is meant.
    """
    for fault in release.faults:
        remedy = f"correct the file; the chart's README lists the values of {version}"
        yield Finding("values", Level.PROBLEM, fault, remedy)
    if not release.is_given:
        detail = "none given, so the checks assume the chart's defaults"
        yield Finding("values", Level.OK, detail, "name your files with --values")
    elif not release.faults:
        yield Finding("values", Level.OK, f"accepted by the chart of {version}")


def check_namespace(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check the namespace and its Pod Security level."""
    check, name = "namespace", facts.namespace
    if facts.namespaces is None:
        yield not_permitted(check, f"the namespace {name}")
        return
    if not facts.namespaces:
        detail = f"{name} does not exist"
        yield Finding(check, Level.OK, detail, "add --create-namespace to `helm install`")
        return
    [found] = facts.namespaces
    if found["metadata"].get("deletionTimestamp"):
        remedy = "wait until it is gone, or choose another namespace"
        yield Finding(check, Level.PROBLEM, f"{name} is being deleted", remedy)
        return
    level = (found["metadata"].get("labels") or {}).get(_ENFORCE)
    if level == "restricted":
        faults = list(_unrestricted(release.values["apiServer"]))
        for fault in faults:
            remedy = "change the value, or relax the namespace's label " + _ENFORCE
            yield Finding(check, Level.PROBLEM, f"{name} is restricted, but {fault}", remedy)
        if faults:
            return
    shown = f"Pod Security level {level}" if level else "no Pod Security level"
    yield Finding(check, Level.OK, f"{name}, {shown}; all pods comply with restricted")


def _unrestricted(api: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value that a restricted namespace refuses."""
    for volume in api["extraVolumes"] or []:
        kinds = volume.keys() - {"name"} - _RESTRICTED_VOLUMES
        if kinds:
            yield f"apiServer.extraVolumes has {volume['name']}, a {', '.join(sorted(kinds))}"
    for container in api["extraContainers"] or []:
        context = container.get("securityContext") or {}
        dropped = (context.get("capabilities") or {}).get("drop") or []
        if context.get("allowPrivilegeEscalation") is not False or "ALL" not in dropped:
            yield (
                f"the securityContext of {container['name']} in apiServer.extraContainers does not"
                " set allowPrivilegeEscalation: false and capabilities: {drop: [ALL]}"
            )


def check_permissions(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check that the user may install the chart."""
    check = "permissions"
    lacking = set(rights.created(release.values)) & facts.denied
    if rights.ESCALATION & facts.denied:
        lacking |= set(rights.granted(release.values)) & facts.denied
    if rights.DEFINITIONS in facts.denied and any(k not in facts.schemas for k in OWN_KINDS):
        lacking.add(rights.DEFINITIONS)
    if not lacking:
        detail = f"enough to install into namespace {facts.namespace}"
        yield Finding(check, Level.OK, detail)
        return
    remedy = "install as a user with these permissions, such as a cluster administrator"
    wide = [each for each in lacking if each.is_cluster_wide and each != rights.DEFINITIONS]
    if wide and release.values["operator"]["readNodes"]:
        remedy += "; without cluster-wide permissions, set operator.readNodes to false"
    detail = f"you may not {rights.named(lacking)}"
    yield Finding(check, Level.PROBLEM, detail, remedy)


def check_storage(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check the volumes that the values name, and those that the chart creates."""
    check = "storage"
    existing, new = list(needs.existing_volumes(release)), list(needs.new_volumes(release))
    if existing and facts.claims is None:
        yield not_permitted(check, "PersistentVolumeClaims")
    elif facts.claims is not None:
        yield from (_existing_volume(each, facts) for each in existing)
    if new and facts.storage_classes is None:
        yield not_permitted(check, "StorageClasses")
    elif facts.storage_classes is not None:
        yield from (_new_volume(each, facts) for each in new)
    if not existing and not new:
        yield Finding(check, Level.OK, "no volumes: a database and an object store")


def _existing_volume(volume: needs.ExistingVolume, facts: ClusterFacts) -> Finding:
    claims = {each["metadata"]["name"]: each for each in facts.claims or []}
    claim = claims.get(volume.name)
    if claim is None:
        detail = f"{volume.field}: namespace {facts.namespace} has no claim {volume.name}"
        remedy = f"create the PersistentVolumeClaim {volume.name} before you install the chart"
        return Finding("storage", Level.PROBLEM, detail, remedy)
    if claim.get("status", {}).get("phase") == "Lost":
        detail = f"{volume.field}: the claim {volume.name} has lost its volume"
        return Finding("storage", Level.PROBLEM, detail, "restore the volume, or use another claim")
    if volume.is_shared and needs.SHARED not in claim["spec"]["accessModes"]:
        return _one_node_only(volume.field, facts)
    return Finding("storage", Level.OK, f"{volume.field}: the claim {volume.name} exists")


def _one_node_only(field: str, facts: ClusterFacts) -> Finding:
    """Judge a volume for checkpoints that pods of several nodes cannot mount."""
    if facts.nodes is None or len(usable_nodes(facts)) > 1:
        detail = f"{field} is not {needs.SHARED}, but session pods may run on several nodes"
        remedy = f"use a volume with {needs.SHARED}, {_USE_A_STORE}"
        return Finding("storage", Level.WARNING, detail, remedy)
    return Finding("storage", Level.OK, f"{field}: one node can mount it, and there is one node")


def _new_volume(volume: needs.NewVolume, facts: ClusterFacts) -> Finding:
    classes = {each["metadata"]["name"]: each for each in facts.storage_classes or []}
    name = volume.storage_class or next(filter(None, map(_default, classes.values())), "")
    others = f"one of {', '.join(sorted(classes))}" if classes else "a new one"
    if not name:
        detail = f"{volume.field}: the cluster has no default StorageClass"
        remedy = f"set {volume.field}.storageClassName to {others}"
        return Finding("storage", Level.PROBLEM, detail, remedy)
    if name not in classes:
        detail = f"{volume.field}.storageClassName: the cluster has no StorageClass {name}"
        remedy = f"set it to {others}"
        return Finding("storage", Level.PROBLEM, detail, remedy)
    provisioner = str(classes[name]["provisioner"])
    shown = f"{volume.field}: StorageClass {name} ({provisioner})"
    if needs.SHARED not in volume.modes:
        if volume.field.startswith("checkpoints"):
            return _one_node_only(volume.field, facts)
        return Finding("storage", Level.OK, shown)
    if provisioner.endswith(_MANY_NODES):
        return Finding("storage", Level.OK, f"{shown} offers {needs.SHARED}")
    if provisioner.endswith(_ONE_NODE):
        remedy = (
            f"set {volume.field}.storageClassName to a class with {needs.SHARED}, {_USE_A_STORE};"
            " on a cluster of one node set accessModes to [ReadWriteOnce]"
        )
        return Finding("storage", Level.PROBLEM, f"{shown} does not offer {needs.SHARED}", remedy)
    remedy = f"read its documentation: checkpoints need {needs.SHARED} unless there is one node"
    return Finding("storage", Level.WARNING, f"{shown} may not offer {needs.SHARED}", remedy)


def _default(storage_class: Manifest) -> str:
    metadata = storage_class["metadata"]
    is_default = (metadata.get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    return str(metadata["name"]) if is_default else ""


def check_secrets(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check the Secrets and ConfigMaps that the values name."""
    wanted = list(needs.secrets(release))
    bundles = list(needs.config_maps(release))
    found = [_entries(each, "Secret", facts.secrets, facts.namespace) for each in wanted]
    found += [_entries(each, "ConfigMap", facts.config_maps, facts.namespace) for each in bundles]
    yield from filter(None, found)
    if not any(found):
        names = sorted({each.name for each in [*wanted, *bundles]})
        detail = f"{', '.join(names)} exist" if names else "the values name none"
        yield Finding("secrets", Level.OK, detail)


def _entries(
    wanted: needs.Entries, kind: str, known: Mapping[str, frozenset[str] | None], namespace: str
) -> Finding | None:
    """Return what is wrong with a Secret or ConfigMap; None for nothing."""
    if wanted.name not in known:
        detail = f"{wanted.field}: namespace {namespace} has no {kind} {wanted.name}"
        remedy = f"create the {kind} {wanted.name} before you install the chart"
        return Finding("secrets", Level.PROBLEM, detail, remedy)
    keys = known[wanted.name]
    if keys is None:
        return not_permitted("secrets", f"the {kind} {wanted.name} ({wanted.field})")
    lacking = sorted(wanted.keys - keys)
    if lacking:
        has = ", ".join(sorted(keys)) or "none"
        detail = f"{wanted.field}: {kind} {wanted.name} has no entry {lacking[0]}; it has {has}"
        remedy = f"add the entry {lacking[0]} to the {kind} {wanted.name}"
        return Finding("secrets", Level.PROBLEM, detail, remedy)
    return None


def check_images(facts: ClusterFacts, release: Release) -> Iterator[Finding]:
    """Check that nodes can pull the images: only pods of a release show it."""
    check = "images"
    registry = release.values["image"]["registry"]
    repository = release.values["apiServer"]["image"]["repository"]
    if not registry and "/" not in repository and release.is_given:
        # The chart of a published release has a registry, and the digests of its images.
        detail = "image.registry is not set: the chart of a published release names its own"
        remedy = f"with the chart of a clone, set it, or load {repository} into every node"
        yield Finding(check, Level.OK, detail, remedy)
    if facts.pods is None:
        yield not_permitted(check, "pods")
        return
    ours = [pod for pod in facts.pods if _is_ours(pod)]
    failing = {pod["metadata"]["name"]: problem for pod in ours if (problem := _pull_problem(pod))}
    for name, (message, remedy) in failing.items():
        yield Finding(check, Level.PROBLEM, f"pod {name}: {message}", remedy)
    if not failing:
        detail = f"{len(ours)} pods have their images"
        if not ours:
            detail = "no pod has pulled an image yet; check again after the installation"
        yield Finding(check, Level.OK, detail)


def _is_ours(pod: Manifest) -> bool:
    found = pod["metadata"].get("labels") or {}
    return found.get(_PART_OF) == labels.MANAGED_BY or labels.SESSION_LABEL in found


def _pull_problem(pod: Manifest) -> tuple[str, str] | None:
    """Return why the image of a container cannot be pulled or run, and what to do."""
    for reason, message, image in _stuck_containers(pod):
        if any(words in message for words in _OTHER_ARCHITECTURE):
            remedy = "set kubernetes.io/arch in the nodeSelector, or build the image for that node"
            return f"{image} is not for the architecture of its node: {message}", remedy
        if reason in _PULL_REASONS:
            remedy = (
                "check image.registry and the tag, image.pullSecrets, and that nodes reach the"
                " registry"
            )
            return f"{image}: {reason}: {message}", remedy
    return None


def _stuck_containers(pod: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yield reason, message and image of each container that waits or was terminated."""
    status = pod.get("status", {})
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        states = {**container.get("lastState", {}), **container.get("state", {})}
        for name in ("waiting", "terminated"):
            if name in states:
                state = states[name]
                image = container.get("image", "")
                yield state.get("reason", ""), state.get("message", ""), image


def check_service(facts: ClusterFacts, version: str) -> Iterator[Finding]:
    """Check the release that is installed in the namespace, if there is one.

    Args:
        facts: what was read.
        version: version of this command.
    """
    check = "release"
    if facts.deployments is None:
        yield not_permitted(check, "Deployments")
        return
    ours = [each for each in facts.deployments if _labels(each).get(_PART_OF) == labels.MANAGED_BY]
    if not ours:
        detail = f"not installed in namespace {facts.namespace}"
        yield Finding(check, Level.OK, detail, "`helm install` is the next step if all is well")
        return
    installed = {_labels(each).get("app.kubernetes.io/version", "unknown") for each in ours}
    if installed != {version}:
        detail = f"{', '.join(sorted(installed))} is installed; this command is of {version}"
        remedy = "use the command of the installed release, or upgrade (UPGRADING.md)"
        yield Finding(check, Level.WARNING, detail, remedy)
    for each in ours:
        yield _deployment(each, facts)


def _deployment(deployment: Manifest, facts: ClusterFacts) -> Finding:
    name, status = deployment["metadata"]["name"], deployment.get("status", {})
    wanted, available = deployment["spec"].get("replicas", 1), status.get("availableReplicas", 0)
    if available or not wanted:
        return Finding("release", Level.OK, f"{name}: {available} of {wanted} pods are ready")
    component = _labels(deployment).get(_COMPONENT)
    reasons = [
        reason
        for pod in facts.pods or []
        if _labels(pod).get(_COMPONENT) == component and _is_ours(pod)
        for reason in _waits_for(pod)
    ]
    detail = f"{name}: no pod is ready" + (f" ({'; '.join(reasons)})" if reasons else "")
    where = f"kubectl --namespace {facts.namespace}"
    remedy = f"see `{where} describe pods` and `{where} logs deployment/{name}`"
    return Finding("release", Level.PROBLEM, detail, remedy)


def _waits_for(pod: Manifest) -> Sequence[str]:
    """Return what a pod waits for: a node, a volume, or a container that does not start."""
    conditions = pod.get("status", {}).get("conditions", [])
    unscheduled = [
        f"{each.get('reason', 'not scheduled')}: {each.get('message', '')}"
        for each in conditions
        if each["type"] == "PodScheduled" and each["status"] == "False"
    ]
    stuck = [f"{reason}: {message}" for reason, message, _ in _stuck_containers(pod)]
    return [*unscheduled, *stuck]


def _labels(manifest: Manifest) -> Mapping[str, str]:
    found: Mapping[str, str] = manifest["metadata"].get("labels") or {}
    return found
