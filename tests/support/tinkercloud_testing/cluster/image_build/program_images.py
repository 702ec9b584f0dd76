"""Images of our programs: those of the Dockerfile, or assembled ones in `.ci/run`.

`tools/images/build.sh` builds them without Docker and a registry, and writes them into an OCI
layout (https://github.com/opencontainers/image-spec/blob/main/image-layout.md), from which nodes
load them.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.assembled_images import assembled_image
from tinkercloud_testing.cluster.image_build.images import Image, Layer
from tinkercloud_testing.cluster.image_build.programs import ROOT, layer_folder, locked

ARE_ASSEMBLED = bool(os.environ.get("TINKERCLOUD_TEST_ASSEMBLED_IMAGES"))
"""Whether images are assembled instead of built: `.ci/run` has no time for ten minutes more."""
TARGETS: Mapping[str, str] = {
    "api-server": "api-server",
    "operator": "operator",
    "worker": "worker-cpu",
    "programs": "programs",
    **({} if ARE_ASSEMBLED else {"recipes": "recipes"}),
}
"""The target of the Dockerfile by the name of the image; the assembled one of programs has the
cookbook."""
_BUILDER = ROOT / "tools" / "images" / "build.sh"


def program_image(name: str) -> Image:
    """Return the image of one of our programs, `tinkercloud.test/<name>:test`.

    It is built, or assembled, if the working tree has changed since it was.

    Args:
        name: a key of `TARGETS`.

    Raises:
        subprocess.CalledProcessError: it can't be built.
    """
    if ARE_ASSEMBLED:
        return assembled_image(name)
    layout, target = layout_folder(), TARGETS[name]
    record = layout / f"{target}.sources"
    with locked(layout / "lock"):
        if not record.exists() or record.read_text() != _sources():
            command = [str(_BUILDER), target]
            environment = {**os.environ, "IMAGES_LAYOUT": str(layout)}
            subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
            _remove_unnamed(layout)
            record.write_text(_sources())
        manifest = _read(layout, _manifests(layout)[target])
    layers = [
        Layer(_blob(layout, layer["digest"]), layer["digest"]) for layer in manifest["layers"]
    ]
    settings = _read(layout, manifest["config"]["digest"])["config"]
    return Image(f"tinkercloud.test/{name}:test", layers, settings)


def layout_folder() -> Path:
    """Return the OCI layout that has the images by their targets."""
    folder = layer_folder().parent / "layout"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _sources() -> str:
    """Return the digest of all that images are built from."""
    content = hashlib.sha256()
    for path in sorted(_built_from()):
        content.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return content.hexdigest()


def _built_from() -> Iterator[Path]:
    yield from (ROOT / "Dockerfile", ROOT / "uv.lock", ROOT / "tools" / "uv-requirements.txt")
    yield from (ROOT / "tools" / "images").iterdir()
    yield from ROOT.glob("*/pyproject.toml")
    for path in ROOT.glob("*/src/**/*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _manifests(layout: Path) -> dict[str, str]:
    """Return the digests of the manifests of a layout by their names."""
    index = json.loads((layout / "index.json").read_text())
    return {
        each["annotations"]["org.opencontainers.image.ref.name"]: each["digest"]
        for each in index["manifests"]
        if "annotations" in each
    }


def _remove_unnamed(layout: Path) -> None:
    """Remove the layers of images that others have replaced: they can be gigabytes."""
    kept = set(_manifests(layout).values())
    for digest in list(kept):
        manifest = _read(layout, digest)
        kept |= {each["digest"] for each in (manifest["config"], *manifest["layers"])}
    for blob in (layout / "blobs" / "sha256").iterdir():
        if f"sha256:{blob.name}" not in kept:
            blob.unlink()


def _read(layout: Path, digest: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_blob(layout, digest).read_bytes())
    return content


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")
