"""Volumes of the real node, which are local folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def a_volume(name: str, namespace: str, folder: Path) -> list[Mapping[str, Any]]:
    """Return a claim in a namespace and its volume, a folder of the node."""
    size = {"storage": "1Gi"}
    modes = ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]
    unique = f"{namespace}-{name}"
    volume = {
        "capacity": size,
        "accessModes": modes,
        "storageClassName": "",
        "hostPath": {"path": str(folder)},
        "claimRef": {"name": name, "namespace": namespace},
    }
    claim = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": unique,
        "resources": {"requests": size},
    }
    metadata = {"name": name, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": unique},
            "spec": volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": claim,
        },
    ]
