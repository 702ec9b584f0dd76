"""Builds the TrainingSessions of pool clusters and warm spares: pure.

They are reconciled like any other session, so each has the pods, the Service and the Secret of a
session with its own pods.
"""

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest


def pool_cluster(name: str, base_model: Manifest) -> Manifest:
    """Return a cluster of the pool of a BaseModel, which owns it."""
    return _cluster(name, "Pool", base_model)


def spare_cluster(name: str, base_model: Manifest) -> Manifest:
    """Return a warm spare of a BaseModel, which owns it until a session takes it over."""
    return _cluster(name, "Spare", base_model)


def session_owner(session: Manifest) -> Manifest:
    """Return the owner reference of a spare that a session has taken over."""
    return _owner("TrainingSession", session)


def _owner(kind: str, manifest: Manifest) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "name": manifest["metadata"]["name"],
        "uid": manifest["metadata"]["uid"],
        "controller": True,
    }


def _cluster(name: str, role: str, base_model: Manifest) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "metadata": {
            "name": name,
            "labels": {
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
                labels.OWNER_LABEL: labels.POOL_OWNER,
            },
            "ownerReferences": [_owner("BaseModel", base_model)],
        },
        "spec": {
            "baseModel": base_model["spec"]["modelName"],
            "role": role,
            "owner": labels.POOL_OWNER,
        },
    }
