"""The states of suspended runs in the checkpoint store, from which other heads resume them."""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.manifest_index import ManifestIndex
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.heads.checkpoint_manifest import (
    SuspendedManifest,
    decode_manifest,
    suspended_key,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import state_prefixes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SuspendedStates:
    """Finds and deletes suspended states."""

    catalog: Catalog
    objects: ObjectStoreClient
    index: ManifestIndex

    async def find(self, run_id: str) -> SuspendedManifest | None:
        """Return a run's suspended state in the store, of any head; None if there is none."""
        return _suspended(run_id, await self.objects.read(suspended_key(run_id)))

    async def is_unsaved(self, run_id: str, generation: str, unsaved: Path | None) -> bool:
        """Whether a run's latest state is in a folder of states that could not be uploaded."""
        return await self._in_folder(run_id, generation, unsaved) is not None

    async def has(self, run_id: str, generation: str, unsaved: Path | None) -> bool:
        """Whether the head of a generation suspended a run with its latest state.

        Args:
            run_id: the run.
            generation: generation of the head that held the run last.
            unsaved: folder of suspended states that could not be uploaded to the store. The state
                of this run is uploaded now; it stays in the folder if that fails.
        """
        stored = await self.find(run_id)
        if stored is not None and stored.continues_from(generation):
            return True
        kept = await self._in_folder(run_id, generation, unsaved)
        if kept is None or unsaved is None:
            return False
        local = unsaved / suspended_key(run_id)
        for name in kept.files:
            await self.objects.upload(kept.key_of(name), unsaved / kept.key_of(name))
        await self.objects.upload(suspended_key(run_id), local)
        await asyncio.to_thread(shutil.rmtree, local.parent)
        log.info("uploaded a suspended run that its head could not upload", run_id=run_id)
        return True

    async def _in_folder(
        self, run_id: str, generation: str, unsaved: Path | None
    ) -> SuspendedManifest | None:
        """Return a run's latest state in a folder of states that could not be uploaded."""
        if unsaved is None:
            return None
        content = await asyncio.to_thread(_read_if_exists, unsaved / suspended_key(run_id))
        kept = _suspended(run_id, content)
        return kept if kept is not None and kept.continues_from(generation) else None

    async def delete(self, run_id: str, generation: str | None) -> None:
        """Delete the state of a deleted run that no head holds. A missing state is not an error.

        If the run was suspended, its automatic checkpoints are deleted too. Those of a lost run
        remain, because an error has named one of them.

        Args:
            run_id: the run.
            generation: generation of the head that held it last; None if none ever did.
        """
        stored = await self.find(run_id)
        if stored is not None and stored.continues_from(generation or ""):
            for path in [p for p in await self.index.in_store(run_id) if p.is_autosave]:
                if await self.catalog.checkpoint(path) is None:
                    await self.objects.delete(path.manifest_key)
                    await self.objects.delete_folder(path.prefix)
        await self.objects.delete(suspended_key(run_id))
        for prefix in state_prefixes(run_id):
            await self.objects.delete_folder(prefix)


def _suspended(run_id: str, content: bytes | None) -> SuspendedManifest | None:
    """Decode a run's suspended state; return None if it is missing or unreadable."""
    if content is None:
        return None
    try:
        name = f"the suspended state of training run {run_id}"
        return decode_manifest(SuspendedManifest, content, name)
    except InvalidRequest as error:
        log.warning("cannot read a suspended state", run_id=run_id, error=error.message)
        return None


def _read_if_exists(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
