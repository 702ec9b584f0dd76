"""A small state folder of a server that has never run, for tests of backups."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config import state_folder
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    SuspendedManifest,
    encode_manifest,
    suspended_key,
)
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

SESSION = "11111111-1111-4111-8111-111111111111"
RUN = f"{SESSION}:train:0"
T = TypeVar("T")


def now() -> datetime:
    return datetime.now(UTC)


def stored(content: bytes) -> StoredFile:
    """Return what a manifest says of a file."""
    return StoredFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def journal_manifest() -> JournalManifest:
    """Return the manifest of the run's journal."""
    return JournalManifest(
        run_id=RUN,
        generations=["g"],
        base_model="m",
        spec=ModelSpec(owner="me", lora=None),
        initial_seed=1,
    )


@dataclass(frozen=True)
class State:
    """The folder: a catalog with one run, checkpoints, and a head with a journal."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "State":
        """Make a state with the checkpoints `one` and `two` and a journal of one segment."""
        state = cls(folder)
        state_folder.make(folder)

        async def fill(catalog: Catalog) -> None:
            await catalog.add_session(
                Session(id=SESSION, owner="me", sdk_version="1", tags=[], user_metadata={})
            )
            await catalog.add_run(
                TrainingRun(id=RUN, session_id=SESSION, owner="me", base_model="m", spec={})
            )

        state.change(fill)
        for name in ("one", "two"):
            state.save(name, name.encode() * 1000)
        head = folder / "heads" / "m-1" / "journals"
        segments = head / "runs" / RUN / "journal"
        segments.mkdir(parents=True)
        (segments / "00000001.log").write_bytes(b"")
        (segments / "manifest.json").write_bytes(encode_manifest(journal_manifest()))
        (folder / "heads" / "m-1" / "head.log").write_text("a log")
        return state

    @property
    def store(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def journals(self) -> Path:
        return self.folder / "heads" / "m-1" / "journals"

    @property
    def settings(self) -> Settings:
        return Settings(state_dir=self.folder)

    def change(self, work: Callable[[Catalog], Awaitable[T]]) -> T:
        """Apply a function to the catalog."""

        async def run() -> T:
            engine = open_database(f"sqlite+aiosqlite:///{self.folder / 'catalog.db'}")
            await migrate(engine)
            catalog = Catalog(engine)
            try:
                return await work(catalog)
            finally:
                await catalog.close()

        return asyncio.run(run())

    def listed(self) -> Mapping[str, datetime | None]:
        """Return when each checkpoint that the catalog lists was saved, by name."""
        rows = self.change(lambda catalog: catalog.checkpoints_of_runs([RUN]))
        return {row.name: row.created_at for row in rows}

    def path(self, name: str) -> CheckpointPath:
        return CheckpointPath(RUN, CheckpointKind.TRAINING, name)

    def save(self, name: str, content: bytes, *, is_listed: bool = True) -> CheckpointManifest:
        """Write a checkpoint, or another one of its name, as a head does."""
        path = self.path(name)
        manifest = CheckpointManifest(
            tinker_path=str(path),
            owner="me",
            base_model="m",
            lora=None,
            step=1,
            created_at=now(),
            files={"model.safetensors": stored(content)},
        )
        self.put(manifest.key_of("model.safetensors"), content)
        self.put(path.manifest_key, encode_manifest(manifest))
        if is_listed:
            self.change(lambda catalog: catalog.index_checkpoint(manifest))
        return manifest

    def put(self, key: str, content: bytes) -> None:
        """Write an object of the store."""
        file = self.store / key
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_name(f"{file.name}#1")
        staged.write_bytes(content)
        staged.replace(file)

    def delete(self, name: str) -> None:
        """Delete a checkpoint as the server does."""
        path = self.path(name)
        (self.store / path.manifest_key).unlink()
        for file in (self.store / path.prefix).iterdir():
            file.unlink()
        self.change(lambda catalog: catalog.forget_checkpoint(path))

    def suspend(self, root: Path, prefix: str, content: bytes) -> SuspendedManifest:
        """Write a suspended state or a snapshot of the run below a folder."""
        manifest = SuspendedManifest(
            run_id=RUN,
            generation="g",
            owner="me",
            base_model="m",
            lora=None,
            created_at=now(),
            data_prefix=prefix,
            files={"head.json": stored(content)},
        )
        file = root / manifest.key_of("head.json")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        staged = root / f"{suspended_key(RUN)}.new"
        staged.write_bytes(encode_manifest(manifest))
        staged.replace(root / suspended_key(RUN))
        return manifest


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, except those of the process that uses it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "server.pid"
    }
