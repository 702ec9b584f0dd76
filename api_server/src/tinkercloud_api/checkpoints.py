"""The server's view of checkpoints: an index in the catalog, the truth in the object store.

The head writes checkpoints; the server learns of one when it forwards the request for it, and
looks at the manifest when somebody asks. So a checkpoint is listed if and only if its manifest
exists, whichever of the two processes died in between. Two things are in the catalog alone: whether
everybody may read a checkpoint, and when it expires, if that was changed after it was saved.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from obstore.store import ObjectStore, from_url

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.statements import Page
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import Checkpoint
from tinkercloud_api.object_store import ObjectStoreClient
from tinkercloud_protocol.catalogue import CheckpointInfo
from tinkercloud_protocol.checkpoints import (
    Manifest,
    SuspendedManifest,
    decode_manifest,
    suspended_key,
)
from tinkercloud_protocol.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_protocol.object_store import allows_http
from tinkercloud_protocol.paths import (
    CheckpointKind,
    CheckpointPath,
    run_prefix,
    suspended_prefix,
)

log = structlog.get_logger(__name__)

_GIVE_UP = timedelta(hours=6)
"""How long the manifest of a requested checkpoint is looked for."""
_NAMED_TO_DELETE = 3
"""Checkpoints that the refusal of a save names."""
_LOOKS_AT_ONCE = 16
"""Manifests that one request reads at a time. If more of one folder are to be looked at, the folder
is listed first."""


def open_store(url: str) -> ObjectStore:
    """Open the object store at a URL; credentials come from the environment."""
    if url.startswith("file:"):
        return from_url(url, mkdir=True, automatic_cleanup=True)
    return from_url(url, client_options={"allow_http": allows_http(os.environ)})


_PROBE_SECONDS = 30.0
"""Between two health checks that write: they cost requests of an object store."""


class Checkpoints:
    """All checkpoints of all owners."""

    def __init__(self, catalog: Catalog, store: ObjectStore) -> None:
        self._catalog = catalog
        self._objects = ObjectStoreClient(store)
        self._writable_until = 0.0

    async def ping(self) -> None:
        """Return if the object store answers, and has taken a write within `_PROBE_SECONDS`.

        Raises:
            Unavailable: it does not; every other method may raise it too.
        """
        if time.monotonic() < self._writable_until:
            await self._objects.ping()
            return
        await self._objects.probe()
        self._writable_until = time.monotonic() + _PROBE_SECONDS

    async def expect(self, path: CheckpointPath, owner: str) -> datetime | None:
        """Note that a head is about to be asked for a checkpoint.

        Returns:
            The moment of the note; None if the checkpoint is waited for already.
        """
        return await self._catalog.record_pending_checkpoint(path, owner)

    async def record_pending_unless_rejected(
        self, path: CheckpointPath, owner: str, ask: Callable[[], Awaitable[int | None]]
    ) -> None:
        """Ask a head for a checkpoint, of which a note stays unless it refuses at once.

        The note comes first, so that the checkpoint is found whichever process dies.

        Args:
            path: of the checkpoint.
            owner: of the key that asks.
            ask: asks, and returns the status of the answer.
        """
        expected = await self.expect(path, owner)
        status = await ask()
        if expected is not None and status is not None and 400 <= status < 500:
            # The answer has been sent. A note that stays is looked at in vain for some hours.
            with suppress(Unavailable):
                await self._catalog.cancel_pending_checkpoint(path, expected)

    async def check_quota(self, path: CheckpointPath, limit: int | None) -> None:
        """Check that a run's owner may save one more checkpoint.

        One that is saved over another needs no room, as the other goes, nor does one that is asked
        for again. Saves under way are not counted: those that began below the limit may end above
        it.

        Args:
            path: of the checkpoint.
            limit: bytes of all checkpoints of one owner; None means any number.

        Raises:
            InvalidRequest: the owner's checkpoints have as many bytes as they may have.
        """
        run = await self._catalog.run(path.run_id) if limit is not None else None
        if limit is None or run is None or await self._catalog.is_known(path):
            return
        owner = run.owner
        await self._refresh(await self._catalog.unindexed_checkpoints(owner))
        size = await self._catalog.size_of_checkpoints(owner)
        if size >= limit:
            largest = await self._catalog.largest_checkpoints(owner, _NAMED_TO_DELETE)
            named = ", ".join(f"{_name(row)} ({row.size_bytes} bytes)" for row in largest)
            raise InvalidRequest(
                f"the checkpoints of {owner!r} have {size} bytes, and may have {limit}"
                " (max_checkpoint_bytes_per_owner): delete some, or give those you save a"
                f" ttl_seconds; the largest are {named}"
            )

    async def manifest(self, path: CheckpointPath, principal: Principal) -> Manifest:
        """Return the manifest of a checkpoint that exists for this principal.

        Raises:
            NotFound: it does not.
            InvalidRequest: the manifest was written by a newer release, or is damaged.
        """
        manifest = await self._required(path)
        row = await self._catalog.checkpoint(path)
        if row is not None and row.created_at == manifest.created_at:
            manifest = manifest.model_copy(update={"expires_at": row.expires_at})
        if manifest.is_expired(datetime.now(UTC)):
            raise _not_found(path)
        if row is None or not row.is_public:
            principal.require(manifest.owner, f"checkpoint {path}")
        return manifest

    async def of_run(self, run_id: str) -> list[CheckpointInfo]:
        """Return a run's checkpoints, oldest first."""
        return (await self.of_runs([run_id]))[run_id]

    async def of_runs(self, run_ids: Sequence[str]) -> dict[str, list[CheckpointInfo]]:
        """Return the checkpoints of each of some runs, oldest first."""
        await self._refresh(await self._catalog.unindexed_checkpoints_of_runs(run_ids))
        found: dict[str, list[CheckpointInfo]] = {run_id: [] for run_id in run_ids}
        for row in await self._catalog.checkpoints_of_runs(run_ids):
            found[row.run_id].append(info(row))
        return found

    async def discover(self, run_id: str) -> None:
        """Note the training checkpoints that a head has written of its own accord."""
        folder = f"{run_prefix(run_id)}/{CheckpointKind.TRAINING}/"
        for name in await self._objects.folders(folder):
            try:
                await self._discover(CheckpointPath(run_id, CheckpointKind.TRAINING, name))
            except InvalidRequest as error:
                log.warning("a folder can't be listed", path=folder + name, error=error.message)

    async def _discover(self, path: CheckpointPath) -> None:
        if await self._catalog.checkpoint(path) is None:
            manifest = await self._read(path)
            if manifest is not None:
                await self._catalog.index_checkpoint(manifest)

    async def is_suspended(self, run_id: str, generation: str, unsaved: Path | None) -> bool:
        """Whether the head of that generation has left what a run had become in it.

        Args:
            run_id: the run.
            generation: of the head that held it last.
            unsaved: folder of states that the store did not take. This run's goes into the store
                now; it stays in the folder if that fails.
        """
        stored = _suspended(run_id, await self._objects.read(suspended_key(run_id)))
        if stored is not None and stored.goes_on_from(generation):
            return True
        if unsaved is None:
            return False
        local = unsaved / suspended_key(run_id)
        content = await asyncio.to_thread(_read_if_there, local)
        kept = _suspended(run_id, content)
        if content is None or kept is None or not kept.goes_on_from(generation):
            return False
        for name in kept.files:
            await self._objects.upload(kept.key_of(name), unsaved / kept.key_of(name))
        await self._objects.upload(suspended_key(run_id), local)
        await asyncio.to_thread(shutil.rmtree, unsaved / suspended_prefix(run_id))
        log.info("a run that its head could not save is in the checkpoint store", run_id=run_id)
        return True

    async def delete_suspended(self, run_id: str) -> None:
        """Delete what a head has left of a run, its manifest first. Nothing is fine."""
        await self._objects.delete(suspended_key(run_id))
        await self._objects.delete_folder(suspended_prefix(run_id))

    async def page(self, owner: str | None, page: Page) -> tuple[list[CheckpointInfo], int]:
        """Return checkpoints, newest first, and how many there are; owner None: everybody's."""
        await self._refresh(await self._catalog.unindexed_checkpoints(owner))
        rows, total = await self._catalog.checkpoints(owner, page)
        return [info(row) for row in rows], total

    async def delete(self, path: CheckpointPath, principal: Principal) -> None:
        """Delete a checkpoint, a damaged one too, or what is left of one half deleted.

        Raises:
            NotFound: it does not exist for this principal.
        """
        row = await self._catalog.checkpoint(path)
        try:
            manifest = await self._read(path)
        except InvalidRequest:
            if row is None:
                raise
            manifest = None
        if manifest is not None:
            principal.require(manifest.owner, f"checkpoint {path}")
            await self._index(manifest)
        elif row is not None and (row.is_indexed or row.damage is not None):
            principal.require(row.owner, f"checkpoint {path}")
        else:
            # Nothing, or one that is being saved.
            raise _not_found(path)
        await self._delete(path)

    async def publish(self, path: CheckpointPath, principal: Principal, *, is_public: bool) -> None:
        """Let everybody read a checkpoint, or only its owner.

        Raises:
            NotFound: it does not exist for this principal.
        """
        manifest = await self._required(path)
        principal.require(manifest.owner, f"checkpoint {path}")
        await self._index(manifest)
        await self._catalog.set_public(path, is_public=is_public)

    async def set_ttl(
        self, path: CheckpointPath, principal: Principal, ttl_seconds: int | None
    ) -> None:
        """Let a checkpoint expire so many seconds from now; None means never.

        Only the catalog knows: a head may be about to replace the manifest.

        Raises:
            NotFound: it does not exist for this principal.
        """
        manifest = await self._required(path)
        principal.require(manifest.owner, f"checkpoint {path}")
        expires_at = None
        if ttl_seconds is not None:
            expires_at = datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        await self._index(manifest)
        await self._catalog.set_expiry(path, expires_at)

    async def delete_expired(self) -> None:
        """Delete the checkpoints whose time to live has passed.

        One that can't be deleted now keeps no other from it, and is tried again the next time.
        """
        await self._refresh(await self._catalog.unindexed_checkpoints(None))
        for row in await self._catalog.expired_checkpoints(datetime.now(UTC)):
            try:
                await self._end(row)
            except WireError as error:
                log.warning("can't let a checkpoint expire", path=_name(row), error=error.message)

    async def _end(self, row: Checkpoint) -> None:
        """Delete a checkpoint that has expired, unless another was saved in its place."""
        path = _path(row)
        manifest = await self._read(path)
        if manifest is not None and manifest.created_at != row.created_at:
            await self._catalog.reindex_checkpoint(manifest)
            return
        log.info("checkpoint expired", path=str(path))
        await self._delete(path)

    async def _required(self, path: CheckpointPath) -> Manifest:
        manifest = await self._read(path)
        if manifest is None:
            raise _not_found(path)
        return manifest

    async def _read(self, path: CheckpointPath) -> Manifest | None:
        content = await self._objects.read(path.manifest_key)
        return None if content is None else decode_manifest(Manifest, content, str(path))

    async def _index(self, manifest: Manifest) -> None:
        """Have the index say what a manifest says.

        If it does already, it goes on to wait for the checkpoint that is saved in its place.
        """
        row = await self._catalog.checkpoint(manifest.path)
        if row is None or row.created_at != manifest.created_at:
            await self._catalog.index_checkpoint(manifest)

    async def _delete(self, path: CheckpointPath) -> None:
        """Delete the manifest, with which the checkpoint ends, and then the files.

        It has expired from then on: if this process dies before the end, `delete_expired` goes on.
        """
        await self._catalog.set_expiry(path, datetime.now(UTC))
        await self._objects.delete(path.manifest_key)
        await self._objects.delete_folder(path.prefix)
        await self._catalog.forget_checkpoint(path)

    async def _refresh(self, rows: Sequence[Checkpoint]) -> None:
        """Look at the manifests of checkpoints that were asked for and not seen yet.

        One that can't be looked at now keeps no other from it, and is looked at the next time.
        """
        limit = asyncio.Semaphore(_LOOKS_AT_ONCE)
        rows = await self._without_those_never_begun(rows)

        async def look_at(row: Checkpoint) -> None:
            async with limit:
                try:
                    await self._look_at(row)
                except WireError as error:
                    log.warning("can't look at a checkpoint", path=_name(row), error=error.message)

        await asyncio.gather(*[look_at(row) for row in rows])

    async def _without_those_never_begun(self, rows: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Leave out checkpoints of which there is no file, where there are many to look at.

        Those are of saves that wait for their turn or failed in it, which may be thousands.
        """
        folders: dict[str, list[Checkpoint]] = {}
        for row in rows:
            folders.setdefault(f"{run_prefix(row.run_id)}/{row.kind}/", []).append(row)
        kept = []
        for folder, inside in folders.items():
            begun = {row.name for row in inside}
            if len(inside) > _LOOKS_AT_ONCE:
                with suppress(Unavailable):
                    begun &= set(await self._objects.folders(folder))
            kept += [row for row in inside if row.name in begun or _is_given_up(row)]
        return kept

    async def _look_at(self, row: Checkpoint) -> None:
        is_given_up = _is_given_up(row)
        try:
            manifest = await self._read(_path(row))
        except InvalidRequest as error:
            # It is listed as such. Until it is given up, another one may take its place.
            if row.damage is None or is_given_up:
                await self._catalog.mark_damaged(_path(row), error.message, is_indexed=is_given_up)
            raise
        # An overwrite is over when the manifest is another one; comparing it with the time of the
        # request would compare the clocks of two machines.
        if manifest is not None and (is_given_up or manifest.created_at != row.created_at):
            await self._catalog.reindex_checkpoint(manifest)
        elif manifest is None and is_given_up:
            await self._catalog.forget_checkpoint(_path(row))


def _is_given_up(row: Checkpoint) -> bool:
    return datetime.now(UTC) - row.asked_at > _GIVE_UP


def _not_found(path: CheckpointPath) -> NotFound:
    return NotFound(f"checkpoint {path} does not exist, or belongs to another owner")


def _name(row: Checkpoint) -> str:
    return str(_path(row))


def _path(row: Checkpoint) -> CheckpointPath:
    return CheckpointPath(row.run_id, CheckpointKind(row.kind), row.name)


def info(row: Checkpoint) -> CheckpointInfo:
    """Return what a list shows of a checkpoint."""
    path = _path(row)
    return CheckpointInfo(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.kind.checkpoint_type,
        time=row.created_at or row.asked_at,
        tinker_path=str(path),
        size_bytes=row.size_bytes or 0,
        public=row.is_public,
        user_metadata=row.user_metadata,
        expires_at=row.expires_at,
        damage=row.damage,
    )


def latest(infos: Sequence[CheckpointInfo], kind: CheckpointKind) -> CheckpointInfo | None:
    """Return the newest checkpoint of a kind that can be read."""
    of_kind = [
        entry
        for entry in infos
        if entry.checkpoint_type == kind.checkpoint_type and entry.damage is None
    ]
    return max(of_kind, key=lambda entry: entry.time, default=None)


def _suspended(run_id: str, content: bytes | None) -> SuspendedManifest | None:
    """Read what a head has left of a run; None if that is nothing that can be read."""
    if content is None:
        return None
    try:
        name = f"the suspended state of training run {run_id}"
        return decode_manifest(SuspendedManifest, content, name)
    except InvalidRequest as error:
        log.warning("a suspended state can't be read", run_id=run_id, error=error.message)
        return None


def _read_if_there(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
