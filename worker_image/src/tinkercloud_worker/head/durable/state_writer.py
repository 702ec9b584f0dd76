"""Writes the files of a suspended state."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tinkercloud_protocol.heads.checkpoint_manifest import GRADIENT, StoredFile, SuspendedManifest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.checkpoints.tensor_file import Growing
from tinkercloud_worker.engine.trainer import Gradient


class StateWriter:
    """Writes the files of one suspended state one at a time, and its manifest last."""

    def __init__(self, store: CheckpointStore, manifest: SuspendedManifest) -> None:
        self._store = store
        self.manifest = manifest
        self.stage: Callable[[int], None] = lambda _: None
        """Called with the size of each file, in bytes, before `put` writes it."""
        self.check_wanted: Callable[[], None] = lambda: None
        """Called before each file, and before each part of one that `write` writes: what it raises
        ends the writing."""
        self._files: dict[str, StoredFile] = {}
        self._unsynchronized: list[str] = []

    async def put(self, name: str, content: bytes) -> None:
        """Write a file, unless one of this name was written."""
        if name not in self._files:
            self.check_wanted()
            self.stage(len(content))
            self._files[name] = await self._store.put_suspended(self.manifest, name, content)

    async def put_state(self, encode: Callable[[], formats.Files]) -> None:
        """Write weights, moments and step, and free what the files are encoded from.

        Args:
            encode: returns the files, such as `formats.encode_state`; called in a thread.
        """
        files = await asyncio.to_thread(encode)
        del encode
        for name, content in files.items():
            await self.put(name, content)

    async def put_gradient(self, gradient: Gradient) -> None:
        """Write the gradient that has not been applied."""
        await self.put(GRADIENT, await asyncio.to_thread(formats.encode_tensors, gradient))

    def write(self, name: str, content: Callable[[Growing], object]) -> None:
        """Write a file part by part, into a local folder. Blocks, on any thread.

        Args:
            name: its name.
            content: writes the content to the file that it is given.

        Raises:
            StoreFailed: it could not be written.
        """
        self._files[name] = self._store.write_suspended(
            self.manifest, name, lambda file: content(_Checked(file, self.check_wanted))
        )
        self._unsynchronized.append(name)

    async def synchronize(self) -> None:
        """Return once all files are on the disk. Call it after `write`, before `commit`."""
        for name in self._unsynchronized:
            self.check_wanted()
            await self._store.synchronize_suspended(self.manifest, name)

    def size_of(self, prefix: str) -> int:
        """Return the bytes of all files whose names have this prefix."""
        return sum(f.size_bytes for name, f in self._files.items() if name.startswith(prefix))

    async def replaced(self) -> SuspendedManifest | None:
        """Return the manifest that `commit` replaces; None if none can be read."""
        try:
            return await self._store.find_suspended(self.manifest.run_id)
        except InvalidRequest:
            return None

    async def commit(self) -> SuspendedManifest:
        """Write the manifest, which makes the state exist."""
        manifest = self.manifest.model_copy(update={"files": self._files})
        await self._store.commit_suspended(manifest)
        return manifest


@dataclass(frozen=True, slots=True)
class _Checked:
    """A growing file whose writing can be ended before each part."""

    file: Growing
    check: Callable[[], None]

    def write(self, content: bytes | memoryview, /) -> None:
        self.check()
        self.file.write(content)
