"""`python -m tinkercloud_worker.fetch_model SOURCE FOLDER [PART]`: download a model.

SOURCE is `hub:<model id>[@<revision>]` on the Hugging Face hub (HF_TOKEN and HF_ENDPOINT are used;
the revision is a commit, a tag or a branch, by default `main`), or a folder in an object store:
`s3://...`, `gs://...`, `az://...` (credentials come from the environment). FOLDER is created
atomically: files are downloaded to a temporary folder next to it, where an interrupted download
resumes, and which is renamed when complete. An existing FOLDER is left unchanged.

Only safetensors weights and the model's description are downloaded: no pickles, no code, and no
second copy of the weights in another layout. PART is `whole` (the default) or `description`, which
is everything except the weights.
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

from tinkercloud_protocol.heads.object_store import open_store

if TYPE_CHECKING:
    from obstore import ObjectMeta

WEIGHTS = "*.safetensors"
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
PARTS = {"whole": (WEIGHTS, *DESCRIPTION), "description": DESCRIPTION}
"""Patterns of the files of each part."""
UNWANTED = ("*/*", "consolidated*")
"""Subfolders and `consolidated` files have the same weights in unsupported layouts."""

_STORES = ("s3://", "gs://", "az://")
_HUB = "hub:"
_INDEX = "model.safetensors.index.json"
_VERSION = ".etag"
"""Suffix of the name of the file that records the ETag of a copied file."""
_PARALLEL_FILES = 4
_CHUNK_BYTES = 32 << 20
"""Bytes of a file per request, which has to finish within half a minute."""


class FetchFailed(Exception):
    """A model can't be downloaded; the message names the source and the reason."""


def fetch(source: str, folder: Path, part: str = "whole") -> None:
    """Download a model to a folder, unless the folder exists. Idempotent, also concurrently.

    Args:
        source: see the module docstring.
        folder: the destination.
        part: a key of `PARTS`.

    Raises:
        FetchFailed: the source is invalid, rejects the request, or has no loadable model, such as
            one whose weights do not match its configuration.
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
            raise FetchFailed(f"failed to download {source}: {_in_one_line(error)}") from error
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
        f"unsupported model source {source!r}; use hub:<model id>[@<revision>], s3://..., gs://..."
        " or az://..."
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
    # Metadata of the hub's client.
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
    """Copy one file in chunks, unless a file with this ETag was copied before."""
    name, size = file["path"], file["size"]
    target = folder / name
    version = folder / f".{name}{_VERSION}"
    if target.exists() and version.exists() and version.read_text() == file["e_tag"]:
        return
    scratch = folder / f".{name}"
    with scratch.open("wb") as written:
        for start in range(0, size, _CHUNK_BYTES):
            span = start, min(start + _CHUNK_BYTES, size)
            # All chunks are of the same object, even if it is replaced meanwhile.
            answer = obstore.get(store, name, options={"range": span, "if_match": file["e_tag"]})
            written.write(answer.bytes())
    scratch.rename(target)
    version.write_text(file["e_tag"] or "")


def _check_complete(source: str, folder: Path, *, with_weights: bool) -> None:
    """Check that the model has its configuration, and all weights if requested."""
    index, needed = folder / _INDEX, {"config.json"}
    if with_weights and index.exists():
        needed |= set(json.loads(index.read_bytes())["weight_map"].values())
    missing = sorted(name for name in needed if not (folder / name).exists())
    if with_weights and not any(folder.glob(WEIGHTS)):
        missing.append("*.safetensors (weights in other formats are not loaded)")
    if missing:
        raise FetchFailed(
            f"{source} is not a complete model in Hugging Face layout: it lacks"
            f" {', '.join(missing)}"
        )


def _check_weights(source: str, folder: Path) -> None:
    """Check that the weights match the configuration: inference engines don't check.

    The temporary folder stays if this fails, and another attempt copies only changed files.
    """
    # Importing transformers and torch takes seconds; fetching a description needs neither.
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
    """Download the model named by the first argument to the folder named by the second."""
    source, folder, *part = sys.argv[1:]
    try:
        fetch(source, Path(folder), *part)
    except FetchFailed as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
