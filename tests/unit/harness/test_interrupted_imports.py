"""An interrupted import of images leaves nothing that a later import could trip over."""

import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from tinkercloud_testing.cluster.image_build import image_store
from tinkercloud_testing.cluster.image_build.image_store import ImageStore
from tinkercloud_testing.cluster.image_build.images import (
    Image,
    LayerCache,
    add_bytes,
    write_archive,
)
from tinkercloud_testing.harness.waiting import wait_until

CTR = """
import os, pathlib, sys, tarfile, uuid

folder, *words = sys.argv[1:]
state = pathlib.Path(folder)


def names(kind):
    return sorted(path.name for path in (state / kind).iterdir())


match words:
    case ["content" | "leases" | "containers" as kind, "list", "--quiet"]:
        print(*names(kind))
    case ["images", "list"]:
        print("REF DIGEST")
    case ["images", "import", "-"]:
        (state / "importing").write_text(str(os.getpid()))
        lease = state / "leases" / f"17-{uuid.uuid4().hex[:4]}"
        lease.touch()
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            for entry in archive:
                if entry.name.startswith("blobs/"):
                    written = state / "content" / entry.name.split("/")[-1]
                    archive.extractfile(entry).read()
                    written.write_text(lease.name)
        for blob in (state / "content").iterdir():
            blob.write_text("image")
        lease.unlink()
    case ["leases", "create", name]:
        (state / "leases" / name.removeprefix("--id=")).touch(exist_ok=False)
    case ["leases", "delete", "--sync", name]:
        (state / "leases" / name).unlink()
        for blob in (state / "content").iterdir():
            if blob.read_text() not in {"image", *names("leases")}:
                blob.unlink()
    case ["leases", "delete", *leases]:
        for name in leases:
            (state / "leases" / name).unlink()
    case _:
        sys.exit(f"unexpected: {words}")
"""
"""A stand-in for containerd and its client: blobs are kept by a lease, or by an image."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for kind in ("content", "leases", "containers"):
        (tmp_path / "state" / kind).mkdir(parents=True)
    (tmp_path / "ctr.py").write_text(CTR)
    return tmp_path / "state"


@pytest.fixture
def store(state: Path) -> ImageStore:
    return ImageStore([sys.executable, "-S", str(state.parent / "ctr.py"), str(state)])


@pytest.fixture
def image(tmp_path: Path) -> Image:
    layers = LayerCache(tmp_path / "layers")
    content = [
        layers.layer(name, lambda tar, name=name: add_bytes(tar, name, os.urandom(1 << 20)))  # type: ignore[misc]
        for name in ("low", "middle", "high")
    ]
    return Image("tinkercloud.test/some:test", content, {"Entrypoint": ["/some"]})


class InterruptedPipe:
    """The standard input of `ctr`, until a number of bytes were written."""

    def __init__(self, pipe: IO[bytes], size: int) -> None:
        self._pipe, self._left = pipe, size

    def write(self, content: bytes) -> int:
        self._left -= len(content)
        if self._left < 0:
            self._pipe.flush()
            raise KeyboardInterrupt
        return self._pipe.write(content)


def load_some(
    store: ImageStore, image: Image, monkeypatch: pytest.MonkeyPatch, state: Path, size: int
) -> None:
    """Import an image and be interrupted once containerd has read some of it."""

    def write(images: Sequence[Image], target: IO[bytes], *, without: set[str]) -> None:
        try:
            write_archive(images, InterruptedPipe(target, size), without=without)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            wait_until((state / "importing").exists, "the start of the import")
            raise

    with monkeypatch.context() as patch:
        patch.setattr(image_store, "write_archive", write)
        with pytest.raises(KeyboardInterrupt):
            store.load(image)


def names(state: Path, kind: str) -> set[str]:
    return {path.name for path in (state / kind).iterdir()}


def layers(image: Image) -> set[str]:
    return {layer.digest.removeprefix("sha256:") for layer in image.layers}


@pytest.mark.parametrize("size", [0, 100_000, 1_500_000, 2_500_000])
def test_an_interrupted_import_is_removed_and_can_be_repeated(
    store: ImageStore, state: Path, image: Image, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    load_some(store, image, monkeypatch, state, size)

    importer = int((state / "importing").read_text())
    assert not Path(f"/proc/{importer}").exists()
    assert names(state, "leases") == set()
    assert names(state, "content") == set()
    store.load(image)
    assert layers(image) < names(state, "content")


def test_an_interrupted_import_keeps_the_leases_of_others(
    store: ImageStore, state: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "leases" / "a-pod").touch()

    load_some(store, image, monkeypatch, state, 1_500_000)

    assert names(state, "leases") == {"a-pod"}


def test_the_next_run_removes_what_a_killed_run_left(
    store: ImageStore, state: Path, image: Image
) -> None:
    [lowest, *_] = sorted(layers(image))
    for lease in ("17-abcd", "garbage"):
        (state / "leases" / lease).touch()
    (state / "content" / lowest).write_text("17-abcd")

    store.remove_leftovers()

    assert names(state, "leases") == set()
    assert names(state, "content") == set()
    store.load(image)
    assert layers(image) < names(state, "content")


def test_a_layer_whose_making_is_interrupted_is_made_from_scratch(tmp_path: Path) -> None:
    layers = LayerCache(tmp_path)

    def fill(tar: tarfile.TarFile) -> None:
        add_bytes(tar, "some", b"some")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layers.layer("key", fill)

    made = layers.layer("key", lambda tar: add_bytes(tar, "all", b"all"))
    with tarfile.open(made.path) as tar:
        assert tar.getnames() == ["all"]
