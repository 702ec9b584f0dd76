"""The pods of a session, from its children: pure."""

from collections.abc import Mapping
from dataclasses import replace

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.spec.observed import ChildKey, Pod


def pods_of(children: Mapping[ChildKey, Manifest], *, are_scaled: bool) -> tuple[Pod, ...]:
    """Return a session's pods; those whose RayCluster is deleted count as terminating.

    Args:
        children: the session's children.
        are_scaled: whether to return engines beyond the minimum, or all other pods.
    """
    owner = next(
        (
            _uid(item)
            for key, item in children.items()
            if key.kind == "RayCluster" and "deletionTimestamp" not in item["metadata"]
        ),
        None,
    )
    pods = [
        item
        for key, item in children.items()
        if key.kind == "Pod"
        and (labels.SCALED_LABEL in item["metadata"].get("labels", {})) == are_scaled
    ]
    return tuple(
        replace(parsing.pod(item), is_terminating=True, disrupted=None)
        if _ray_cluster_of(item) not in {owner, None}
        else parsing.pod(item)
        for item in pods
    )


def failed_pod(last: Manifest | None, children: Mapping[ChildKey, Manifest]) -> Pod | None:
    """Return the session's last failed pod, if its RayCluster exists."""
    clusters = {_uid(item) for key, item in children.items() if key.kind == "RayCluster"}
    return parsing.pod(last) if last is not None and _ray_cluster_of(last) in clusters else None


def _ray_cluster_of(pod: Manifest) -> str | None:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner["kind"] == "RayCluster"), None)


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"]["uid"])
