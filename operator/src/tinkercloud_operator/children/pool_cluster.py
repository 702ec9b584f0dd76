"""Builds the TrainingSession of a pool cluster: pure.

It is reconciled like any other session, so a pool cluster has the pods, the Service and the Secret
of a session with its own pods.
"""

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest


def pool_cluster(name: str, base_model: Manifest) -> Manifest:
    """Return a cluster of the pool of a BaseModel, which owns it."""
    metadata = base_model["metadata"]
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": "BaseModel",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "metadata": {
            "name": name,
            "labels": {
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
                labels.OWNER_LABEL: labels.POOL_OWNER,
            },
            "ownerReferences": [owner],
        },
        "spec": {
            "baseModel": base_model["spec"]["modelName"],
            "role": "Pool",
            "owner": labels.POOL_OWNER,
        },
    }
