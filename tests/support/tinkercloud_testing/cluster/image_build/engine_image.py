"""An image whose `python3 -m sglang.launch_server` starts the fake SGLang.

Also a server with that image that belongs to no session.
"""

import hashlib
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_testing.cluster.image_build.images import (
    USER,
    Image,
    Layer,
    LayerCache,
    add_bytes,
    add_tree,
)
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.image_build.programs import layer_folder
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.sglang.engine import REFUSES
from tinkercloud_testing.sglang.source import sglang_sources

_NAME = "tinkercloud.test/engine:test"
_MODULES = "/opt/engine"
_CACHE = "/opt/cache"
_TESTING = Path(__file__).parents[2]
# The processes of its ranks import this module too.
_START = b"""from tinkercloud_testing.sglang.engine import main

if __name__ == "__main__":
    main()
"""


def engine_image() -> Image:
    """Return the image of the worker with the fake SGLang as an additional layer."""
    worker = program_image("worker")
    environment = [
        *worker.settings["Env"],
        f"PYTHONPATH={_MODULES}",
        f"TINKERCLOUD_TEST_SGLANG_SOURCES={_CACHE}/{sglang_sources().name}",
    ]
    return Image(_NAME, [*worker.layers, _fake()], {**worker.settings, "Env": environment})


def requested_paths(cluster: Cluster, namespace: str) -> set[str]:
    """Return the paths of the requests to all engines in a namespace."""
    where = (f"--namespace={namespace}", "--container=engine", "--tail=-1")
    selector = f"--selector={labels.COMPONENT_LABEL}=sampler"
    return set(cluster.kubectl("logs", selector, *where).split())


def an_external_server(
    name: str, key: str, adapters_folder: str, refuses: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the pod and the Service of an externally operated server.

    Args:
        name: the name of both.
        key: the API key of the server.
        adapters_folder: the mount path of the volume `adapters`.
        refuses: the paths of requests to reject.
    """
    selector, port = {"app": name}, 30000
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"port": port}]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": selector},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_server(key, port, adapters_folder, refuses)],
            "volumes": [
                {"name": claim, "persistentVolumeClaim": {"claimName": claim}}
                for claim in ("models", "adapters")
            ],
        },
    }
    return [service, pod]


def _server(key: str, port: int, adapters_folder: str, refuses: Sequence[str]) -> dict[str, Any]:
    options = {
        "--model-path": "/models/tiny",
        "--host": "0.0.0.0",  # noqa: S104 - a pod's own address
        "--port": port,
        "--api-key": key,
        "--admin-api-key": key,
        "--dtype": "float32",
        "--tp-size": 1,
        "--context-length": 512,
        "--max-lora-rank": 4,
        "--lora-target-modules": "all",
        "--grammar-backend": "llguidance",
    }
    words = [str(word) for option in options.items() for word in option]
    return {
        "name": "server",
        "image": _NAME,
        "command": ["python3", "-m", "sglang.launch_server", *words],
        "args": ["--enable-lora", "--enable-deterministic-inference"],
        "env": [
            {"name": "SGLANG_RETURN_ORIGINAL_LOGPROB", "value": "1"},
            {"name": REFUSES, "value": " ".join(refuses)},
        ],
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 1},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "adapters", "mountPath": adapters_folder, "readOnly": True},
        ],
    }


def _fake() -> Layer:
    sources = sglang_sources()
    ours = [path for path in _TESTING.rglob("*.py") if "cluster" not in path.parts]
    files = [*sorted(ours), *sorted(sources.rglob("*.py"))]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files) + _START)

    def fill(tar: tarfile.TarFile) -> None:
        add_bytes(tar, f"{_MODULES}/sglang/__init__.py", b"")
        add_bytes(tar, f"{_MODULES}/sglang/launch_server.py", _START)
        add_tree(tar, _TESTING, f"{_MODULES}/tinkercloud_testing", without={"cluster"})
        add_tree(tar, sources, f"{_CACHE}/{sources.name}", without={"wheel"})

    layers = LayerCache(layer_folder())
    return layers.layer(f"engine 4 {content.hexdigest()}", fill)
