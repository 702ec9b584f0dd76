"""Detects the deletion of a Secret without the permission to watch Secrets: pure.

A permission to list or watch Secrets would expose every Secret of the namespace, so the operator
may only get and create them by name. Each session's Secret therefore has a marker: an empty
ConfigMap that the session and the Secret own together. When the Secret is deleted, the garbage
collector removes its owner reference from the marker within seconds, which the operator receives as
an ordinary watch event. The Secret exists as long as the marker references it, so the operator
never reads Secrets to check.
"""

from collections.abc import Mapping
from typing import Any

from tinkercloud_crds.names import Names
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import ChildKey


def secret_marker(secret: Manifest, uid: str) -> dict[str, Any]:
    """Return the marker of a Secret.

    Args:
        secret: manifest of the Secret.
        uid: uid that the API server assigned to it.
    """
    metadata = secret["metadata"]
    own = {"apiVersion": "v1", "kind": "Secret", "name": metadata["name"], "uid": uid}
    owners = [*metadata["ownerReferences"], own]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "ownerReferences": owners},
    }


def has_secret(session: str, children: Mapping[ChildKey, Manifest]) -> bool:
    """Return whether a session's Secret exists, according to its marker."""
    found = children.get(ChildKey("ConfigMap", Names(session).token_secret), {"metadata": {}})
    owners = found["metadata"].get("ownerReferences", [])
    return any(owner["kind"] == "Secret" for owner in owners)
