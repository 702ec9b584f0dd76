"""An image whose `python3 -m sglang.launch_server` is the fake SGLang, with all it imports."""

import dataclasses
import hashlib
import tarfile
from pathlib import Path

from tinkercloud_testing.cluster.images import (
    Image,
    Layer,
    LayerCache,
    add_bytes,
    add_link,
    add_tree,
)
from tinkercloud_testing.cluster.program_images import program_image
from tinkercloud_testing.cluster.programs import build_folder
from tinkercloud_testing.sglang import sglang_sources

_MODULES = "/opt/engine"
_CACHE = "/opt/cache"
_TESTING = Path(__file__).parents[1]
_START = b"from tinkercloud_testing.sglang_program import main\n\nmain()\n"


def engine_image() -> Image:
    """Return the image: that of the worker, and the fake above it."""
    worker = program_image("worker")
    environment = {**worker.environment, "PYTHONPATH": _MODULES, "XDG_CACHE_HOME": _CACHE}
    return dataclasses.replace(
        worker,
        name="tinkercloud.test/engine:test",
        layers=[*worker.layers, _fake()],
        environment=environment,
    )


def _fake() -> Layer:
    sources = sglang_sources()
    files = [*sorted(_TESTING.glob("*.py")), *sorted(sources.rglob("*.py"))]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files) + _START)

    def fill(tar: tarfile.TarFile) -> None:
        add_link(tar, "/opt/venv/bin/python3", "python")
        add_bytes(tar, f"{_MODULES}/sglang/__init__.py", b"")
        add_bytes(tar, f"{_MODULES}/sglang/launch_server.py", _START)
        add_tree(tar, _TESTING, f"{_MODULES}/tinkercloud_testing", without={"cluster"})
        add_tree(tar, sources, f"{_CACHE}/tinkercloud/{sources.name}", without={"wheel"})

    layers = LayerCache(build_folder("kubectl").parent / "layers")
    return layers.layer(f"engine 2 {content.hexdigest()}", fill)
