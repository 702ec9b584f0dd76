"""Writes the checkpoints of one model: named ones, and those that the head writes by itself."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, WireError
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import TrainingState
from tinkercloud_worker.head.backend import Backend

log = structlog.get_logger(__name__)

_KEPT_AUTOSAVES = 2
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class ModelCheckpoints:
    """The checkpoints of one model. Belongs to one event loop."""

    def __init__(self, name: str, spec: ModelSpec, backend: Backend) -> None:
        self._name = name
        self._spec = spec
        self._backend = backend
        self._uploads: dict[str, asyncio.Task[CheckpointManifest]] = {}
        self._autosaves: dict[CheckpointPath, datetime] | None = None
        """When each automatic checkpoint in the store was created; None until it was listed."""
        self._last_moment = _LONG_AGO
        self.latest: CheckpointManifest | None = None
        """The latest training checkpoint that was written, other than automatic ones."""
        self._latest_autosave: CheckpointManifest | None = None
        self.inherited: str | None = None
        """Path of the latest training checkpoint that an earlier head of a resumed model wrote."""

    def to_resume_from(self) -> str | None:
        """Return the path of the latest state in the store; None if there is none."""
        written = [each for each in (self.latest, self._latest_autosave) if each is not None]
        newest = max(written, key=lambda manifest: manifest.created_at, default=None)
        if newest is not None:
            return newest.tinker_path
        return self.inherited or self._spec.restore_from

    def next_moment(self) -> datetime:
        """Return a timestamp later than that of every checkpoint the run has saved.

        It identifies the latest checkpoint, even after this machine's clock was set back.
        """
        self._last_moment = max(datetime.now(UTC), self._last_moment + timedelta(microseconds=1))
        return self._last_moment

    def continue_after(self, moment: datetime) -> None:
        """Make all later timestamps greater than this one."""
        self._last_moment = max(self._last_moment, moment)

    def manifest(
        self,
        path: CheckpointPath,
        step: int,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        seq_id: int | None = None,
    ) -> CheckpointManifest:
        """Return the manifest of a new checkpoint, without files.

        Args:
            path: its path.
            step: number of optimizer steps taken.
            ttl_seconds: after which time it expires; None for never.
            user_metadata: the client's.
            seq_id: number of the request that saves it; None if no request does.
        """
        now, created_at = datetime.now(UTC), self.next_moment()
        return CheckpointManifest(
            tinker_path=str(path),
            owner=self._spec.owner,
            base_model=self._backend.config.model.name,
            base_fingerprint=self._backend.base_fingerprint,
            lora=self._spec.lora,
            optimizer=self._spec.optimizer,
            step=step,
            created_at=created_at,
            expires_at=now + timedelta(seconds=ttl_seconds) if ttl_seconds else None,
            user_metadata=user_metadata,
            saved_by=f"{self._name}:{seq_id}" if seq_id else None,
            files={},
        )

    async def begin(
        self, path: CheckpointPath, seq_id: int | None, *, overwrite: bool = False
    ) -> CheckpointManifest | None:
        """Check that a name is unused, or may be overwritten; wait for its upload first.

        Returns:
            The checkpoint that the request of this number saved there before; None if it did not.
            An earlier head that was killed may have written it, without that the client knows.

        Raises:
            InvalidRequest: the name is in use.
        """
        saved = await self._backend.store.find(path)
        if saved is not None and saved.saved_by == f"{self._name}:{seq_id or 0}":
            return saved
        if (upload := self._uploads.get(str(path))) is not None:
            await asyncio.gather(upload, return_exceptions=True)
        await self._backend.store.refuse_duplicate(path, overwrite=overwrite)
        return None

    def upload(
        self,
        manifest: CheckpointManifest,
        encode: Callable[[], formats.Files],
        *,
        overwrite: bool,
    ) -> "asyncio.Task[CheckpointManifest]":
        """Start writing a checkpoint; return the task, whose result is the final manifest.

        Args:
            manifest: its manifest.
            encode: returns the files; called in a thread, and then freed.
            overwrite: whether a checkpoint of the same name may be replaced.
        """
        name = manifest.tinker_path
        task = asyncio.create_task(self._write(manifest, encode, overwrite=overwrite))
        self._uploads[name] = task
        task.add_done_callback(lambda _: self._uploads.pop(name, None))
        return task

    async def _write(
        self,
        manifest: CheckpointManifest,
        encode: Callable[[], formats.Files],
        *,
        overwrite: bool,
    ) -> CheckpointManifest:
        path = manifest.path
        files = await asyncio.to_thread(encode)
        # Free the encoded state, which is as large again, before the slow part.
        del encode
        written = await self._backend.store.write(manifest, files, overwrite=overwrite)
        is_named_training = path.kind is CheckpointKind.TRAINING and not path.is_autosave
        is_newer = self.latest is None or self.latest.created_at < written.created_at
        if is_named_training and is_newer:
            self.latest = written
        return written

    async def settle(self) -> None:
        """Wait until no named checkpoint is being written."""
        await asyncio.gather(*self._uploads.values(), return_exceptions=True)

    def write_state(
        self, state: TrainingState, name_of: Callable[[int], str], *, overwrite: bool
    ) -> "asyncio.Task[CheckpointManifest]":
        """Start writing a state without a gradient; see `upload`.

        Args:
            state: the state, which the caller should not keep: it is freed once it is encoded.
            name_of: returns the name of its checkpoint from the number of its step.
            overwrite: whether to replace a checkpoint of this name.
        """
        path = CheckpointPath(self._name, CheckpointKind.TRAINING, name_of(state.step))
        manifest = self.manifest(path, state.step)
        encode = partial(formats.encode_state, state, manifest.base_model)
        return self.upload(manifest, encode, overwrite=overwrite)

    def write_autosave(self, state: TrainingState) -> "asyncio.Task[CheckpointManifest]":
        """Start writing an automatic checkpoint; see `upload`. Cancel the task to abandon it.

        It isn't among the uploads that `settle` waits for.
        """
        path = CheckpointPath.of_autosave(self._name, state.step)
        manifest = self.manifest(path, state.step)
        encode = partial(formats.encode_state, state, manifest.base_model)
        return asyncio.create_task(self._write_autosave(manifest, encode))

    async def _write_autosave(
        self, manifest: CheckpointManifest, encode: Callable[[], formats.Files]
    ) -> CheckpointManifest:
        autosaves = await self._list_autosaves()
        is_new = manifest.path not in autosaves
        # Before it is written, so that it is also removed if writing is abandoned.
        autosaves.setdefault(manifest.path, _LONG_AGO)
        writing = self._write(manifest, encode, overwrite=True)
        del encode
        try:
            self._latest_autosave = written = await writing
        except Exception:
            if is_new:
                # A store that is full should not keep half of it.
                with suppress(WireError):
                    await self._backend.store.delete(manifest.path)
                    del autosaves[manifest.path]
            raise
        autosaves[written.path] = written.created_at
        try:
            for path in sorted(autosaves, key=autosaves.__getitem__)[:-_KEPT_AUTOSAVES]:
                await self._backend.store.delete(path)
                del autosaves[path]
        except WireError as error:
            # They are deleted after the next save.
            log.warning("failed to delete old autosaves", model_id=self._name, error=error.message)
        return written

    async def remove_autosaves(self) -> None:
        """Delete all automatic checkpoints, unless the store fails: then some remain, as logged."""
        try:
            autosaves = await self._list_autosaves()
            for path in list(autosaves):
                await self._backend.store.delete(path)
                del autosaves[path]
        except WireError as error:
            log.warning("failed to delete autosaves", model_id=self._name, error=error.message)
        self._latest_autosave = None

    async def _list_autosaves(self) -> dict[CheckpointPath, datetime]:
        """Return the automatic checkpoints in the store, those of earlier heads included."""
        if self._autosaves is None:
            paths = await self._backend.store.autosaves(self._name)
            self._autosaves = {path: await self._created_at(path) for path in paths}
        return self._autosaves

    async def _created_at(self, path: CheckpointPath) -> datetime:
        """Return when a checkpoint was created; one that is incomplete or damaged is the oldest."""
        try:
            manifest = await self._backend.store.find(path)
        except InvalidRequest:
            manifest = None
        return manifest.created_at if manifest is not None else _LONG_AGO
