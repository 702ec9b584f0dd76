"""How the end of a Secret is seen without the right to see Secrets: pure.

Who may list or watch Secrets may read all of the namespace, so the operator may only read and
create them by name. Each session's Secret therefore has a secret_marker: an empty ConfigMap that the
session and the Secret own together. When the Secret goes, the garbage collector takes its reference
out of the secret_marker, which is an event like any other, at most seconds later. A session whose secret_marker
names a Secret has one, and no Secret is ever read to find that out.
"""

from collections.abc import Mapping
from typing import Any

from tinkercloud_operator.children.pods import Names
from tinkercloud_operator.spec.snapshot import ChildKey, Manifest


def secret_marker(secret: Manifest, uid: str) -> dict[str, Any]:
    """Return the secret_marker of a Secret.

    Args:
        secret: as it is wanted.
        uid: that the API server gave it.
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
    """Whether a session's Secret is there, by its secret_marker among the session's live children."""
    found = children.get(ChildKey("ConfigMap", Names(session).token_secret), {"metadata": {}})
    owners = found["metadata"].get("ownerReferences", [])
    return any(owner["kind"] == "Secret" for owner in owners)
