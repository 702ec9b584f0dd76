"""The journal of a training run: where it is, and the file that says whose state it has.

A head with a journal folder (`HeadConfig.journal_dir`) keeps `<folder>/runs/<run id>/` for each
run:

    journal/manifest.json     a `JournalManifest`, replaced atomically
    journal/<number>.log      segments of the journal (`tinkercloud_worker.journal`)
    journal/deaths.json       which repeated requests ended heads, if any (`JournalFolder.deaths`)
    suspended/                the latest snapshot, as a suspended state (`checkpoint_manifest`)

Without a snapshot, the journal starts with the creation of the model.
"""

import shutil
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from tinkercloud_protocol.heads.checkpoint_manifest import decode_manifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.heads.releases import Versions
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable
from tinkercloud_protocol.wire.paths import run_prefix

_MANIFEST = "manifest.json"


class Deaths(BaseModel):
    """Content of `deaths.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    versions: ClassVar[Versions] = Versions(2, 2)
    format_version: int = versions.newest
    deaths: dict[int, int]
    """How many heads ended while they repeated a request, by the request's number."""


class JournalManifest(BaseModel):
    """Metadata of a run's journal."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    versions: ClassVar[Versions] = Versions(2, 2)
    format_version: int = versions.newest
    run_id: str
    generations: list[str]
    """Generations of the heads whose state the journal has, oldest first."""
    base_model: str
    base_fingerprint: str | None = None
    """See `CheckpointManifest.base_fingerprint`."""
    spec: ModelSpec
    """Specification of the model."""
    initial_seed: int
    """Seed of the adapter's initial weights."""


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run in a journal folder."""
    return root / run_prefix(run_id)


def manifest_path(root: Path, run_id: str) -> Path:
    """Return the path of a run's `JournalManifest`."""
    return segments_folder(root, run_id) / _MANIFEST


def segments_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run's segments."""
    return run_folder(root, run_id) / "journal"


def read_manifest(root: Path, run_id: str) -> JournalManifest | None:
    """Return the manifest of a run's journal; None if it has no journal.

    Raises:
        OSError: the disk can't be read.
        InvalidRequest: the manifest is damaged, or a newer release wrote it.
    """
    try:
        content = manifest_path(root, run_id).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    name = f"training run {run_id} can't be continued: its journal"
    return decode_manifest(JournalManifest, content, name)


def run_ids(root: Path) -> list[str]:
    """Return the ids of the runs that have a journal, in order.

    Raises:
        OSError: the disk can't be read.
    """
    return sorted(path.parents[1].name for path in root.glob(f"runs/*/journal/{_MANIFEST}"))


def delete_withdrawn(root: Path) -> None:
    """Delete the folders of runs whose journal was withdrawn, as far as possible. Blocks."""
    for folder in root.glob(f"{run_prefix('*')}"):
        if not (folder / "journal" / _MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)


def has_journal(root: Path | None, run_id: str, generation: str) -> bool:
    """Return whether a journal has the state of a run in the head of a generation.

    A manifest that can't be understood may have it: the head that continues the run names the
    damage.

    Raises:
        Unavailable: the disk can't be read.
    """
    try:
        manifest = read_manifest(root, run_id) if root is not None else None
    except OSError as error:
        raise Unavailable(
            f"whether training run {run_id} left a journal can't be determined: the disk can't be"
            f" read ({error}); send the request again"
        ) from None
    except InvalidRequest:
        return True
    return manifest is not None and generation in manifest.generations
