"""`python -m tinkercloud_worker.fetch_model SOURCE FOLDER [PART]`: a model from where it is kept.

SOURCE is `hub:<model id>[@<revision>]` on the Hugging Face hub (HF_TOKEN and HF_ENDPOINT count; the
revision is a commit, a tag or a branch, and `main` unless given), or a folder in an object store:
`s3://...`, `gs://...`, `az://...` (credentials come from the environment). FOLDER appears whole or
not at all: files gather in a folder beside it, where a fetch that was cut off goes on, and which is
renamed at last. A FOLDER that is there is left as it is.

Only weights in safetensors and what describes them are fetched: no pickles, no code, and no second
copy of the weights in another layout. PART is `whole` unless it is `description`, which is all but
the weights.
"""

import fcntl
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from tinkercloud_protocol.object_store import open_store

if TYPE_CHECKING:
    from obstore import ObjectMeta

WEIGHTS = "*.safetensors"
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
PARTS = {"whole": (WEIGHTS, *DESCRIPTION), "description": DESCRIPTION}
"""Patterns of the files of each part."""
UNWANTED = ("*/*", "consolidated*")
"""Subfolders and `consolidated` files hold the same weights in layouts that are not read here."""

_STORES = ("s3://", "gs://", "az://")
_HUB = "hub:"
_INDEX = "model.safetensors.index.json"
_VERSION = ".etag"
"""Ends the name of the file that holds the ETag of another one that was copied."""
_PARALLEL_FILES = 4
_CHUNK_BYTES = 32 << 20
"""Of a file that are asked for at once: a request has half a minute."""


class FetchFailed(Exception):
    """A model can't be had; the message names its source and the reason."""


def fetch(source: str, folder: Path, part: str = "whole") -> None:
    """Fetch a model into a folder, unless that exists. Repeating it is fine, at any time.

    Args:
        source: see the module.
        folder: where it shall be.
        part: of `PARTS`.

    Raises:
        FetchFailed: the source is not understood, refuses, or holds no model that can be loaded:
            its weights are not those that its configuration describes.
    """
    download = _downloader(source, PARTS[part])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        partial = folder.with_name(f".{folder.name}.partial")
        partial.mkdir(exist_ok=True)
        try:
            download(partial)
        except (BaseError, HFValidationError, OSError) as error:
            raise FetchFailed(f"{source} can't be fetched: {_in_one_line(error)}") from error
        _check_complete(source, partial, with_weights=WEIGHTS in PARTS[part])
        if part == "whole":
            _check_weights(source, partial)
        for version in partial.glob(f".*{_VERSION}"):
            version.unlink()
        partial.rename(folder)


def _downloader(source: str, wanted: Sequence[str]) -> Callable[[Path], None]:
    if source.startswith(_HUB):
        return lambda folder: _from_hub(source.removeprefix(_HUB), folder, wanted)
    if source.startswith(_STORES):
        return lambda folder: _from_store(open_store(source), folder, wanted)
    raise FetchFailed(
        f"{source!r} is no source of a model: name hub:<model id>[@<revision>], or a folder as s3://...,"
        " gs://... or az://..."
    )


def _from_hub(model: str, folder: Path, wanted: Sequence[str]) -> None:
    model_id, _, revision = model.partition("@")
    snapshot_download(
        model_id,
        revision=revision or None,
        local_dir=folder,
        allow_patterns=list(wanted),
        ignore_patterns=list(UNWANTED),
        max_workers=_PARALLEL_FILES,
    )
    # What the hub's client keeps there for itself.
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _from_store(store: ObjectStore, folder: Path, wanted: Sequence[str]) -> None:
    files = [file for batch in obstore.list(store) for file in batch]
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        copies = [
            pool.submit(_copy, store, file, folder)
            for file in files
            if _matches(file["path"], wanted) and not _matches(file["path"], UNWANTED)
        ]
        for copy in copies:
            copy.result()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _copy(store: ObjectStore, file: "ObjectMeta", folder: Path) -> None:
    """Copy one file, a chunk at a time; one that was copied before is known by its ETag."""
    name, size = file["path"], file["size"]
    target = folder / name
    version = folder / f".{name}{_VERSION}"
    if target.exists() and version.exists() and version.read_text() == file["e_tag"]:
        return
    scratch = folder / f".{name}"
    with scratch.open("wb") as written:
        for start in range(0, size, _CHUNK_BYTES):
            span = start, min(start + _CHUNK_BYTES, size)
            # Of one file, even if another takes its place meanwhile.
            answer = obstore.get(store, name, options={"range": span, "if_match": file["e_tag"]})
            written.write(answer.bytes())
    scratch.rename(target)
    version.write_text(file["e_tag"] or "")


def _check_complete(source: str, folder: Path, *, with_weights: bool) -> None:
    """Check that a model's configuration is there, and all its weights if they are wanted."""
    index, needed = folder / _INDEX, {"config.json"}
    if with_weights and index.exists():
        needed |= set(json.loads(index.read_bytes())["weight_map"].values())
    missing = sorted(name for name in needed if not (folder / name).exists())
    if with_weights and not any(folder.glob(WEIGHTS)):
        missing.append("*.safetensors (weights in other formats are not loaded)")
    if missing:
        raise FetchFailed(
            f"{source} is not a whole model in Hugging Face layout: it lacks {', '.join(missing)}"
        )


def _check_weights(source: str, folder: Path) -> None:
    """Check that the weights are those of the model: inference engines load whatever they are.

    A folder that is refused stays where it is: another attempt copies only what has changed.
    """
    # transformers and torch take seconds, which a fetch of the description does not owe.
    from tinkercloud_worker.model.architecture import UnsupportedModelError  # noqa: PLC0415
    from tinkercloud_worker.model.weights_check import check_values, check_weights  # noqa: PLC0415

    try:
        check_weights(str(folder))
        check_values(str(folder))
    except UnsupportedModelError as error:
        message = str(error).replace(str(folder), source)
        raise FetchFailed(message) from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main() -> None:
    """Fetch the model named by the first argument into the folder named by the second."""
    source, folder, *part = sys.argv[1:]
    try:
        fetch(source, Path(folder), *part)
    except FetchFailed as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
