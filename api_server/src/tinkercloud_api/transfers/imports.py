"""Imports adapters of Hugging Face PEFT as training checkpoints, in three steps.

`start` checks the configuration and reserves room, `receive` streams `adapter_model.safetensors`
into the store and checks its header before the first tensor, and each value. `finish` compares it
with its configuration and its base model, and writes the manifest. An upload that is not finished
before it expires is deleted, and one whose content is refused at once: the owner may have few of
them.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.project_rights import Projects
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.schema.tables import Upload, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.transfers.base_weights import read_base
from tinkercloud_api.transfers.stored_runs import StoredRuns, is_open
from tinkercloud_protocol.adapters import adapter_fit, peft
from tinkercloud_protocol.adapters.adapter_file import AdapterFile
from tinkercloud_protocol.adapters.adapter_fit import BaseWeights
from tinkercloud_protocol.heads.checkpoint_manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CheckpointManifest,
    ImportedAdapter,
    StoredFile,
)
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, new_session_id
from tinkercloud_protocol.wire.json_model import Name, TtlSeconds, UserMetadata, WireModel
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_LIFETIME = timedelta(hours=1)
"""Time to send the file and to finish."""
_PART_BYTES = 1 << 20
"""Bytes that are checked at a time, in a thread."""
_CHUNK_SECONDS = 60.0
"""Maximum time between two parts of a body."""
MAX_CONFIG_BYTES = 64 << 10
"""Maximum size of `adapter_config.json`."""


class Refused(InvalidRequest):
    """The content of an upload can't be imported, however often it is sent."""


class StartUpload(WireModel):
    """POST checkpoints/uploads."""

    base_model: Name
    adapter_config: dict[str, Any]
    """The content of adapter_config.json."""
    size_bytes: Annotated[int, Field(gt=0)]
    """Size of adapter_model.safetensors."""
    name: Name = "imported"
    """Name of the checkpoint."""
    owner: Name | None = None
    """Owner of the checkpoint, if it is not the caller; admins only."""
    project_id: Name | None = None
    ttl_seconds: TtlSeconds | None = None
    user_metadata: UserMetadata | None = None


class StartExternalUpload(WireModel):
    """POST external_weights_upload_start."""

    base_model: Name
    lora_config: LoraConfig
    destination_project_id: Name | None = None


@dataclass(frozen=True, slots=True)
class Imports:
    """Imports adapters. Belongs to one event loop."""

    catalog: Catalog
    training_runs: TrainingRuns
    stored_runs: StoredRuns
    projects: Projects
    max_import_bytes: int
    _receiving: set[str] = field(default_factory=set)
    """Uploads whose file is being received."""

    async def start(self, request: StartUpload, caller: Principal) -> Upload:
        """Start an upload whose configuration is known.

        Raises:
            NotFound: the project does not exist for the caller.
            Forbidden: the caller is only a viewer of it.
            InvalidRequest: the adapter cannot be imported, or there is no quota for it.
            Overloaded: the owner has too many unfinished uploads and copies.
        """
        owner = request.owner or caller.owner
        if owner != caller.owner and caller.role is not Role.ADMIN:
            raise InvalidRequest(
                f"owner: only an admin may import for another owner (got {owner!r}); omit it"
            )
        await self._check_project(request.project_id, caller)
        self._check_size("size_bytes", request.size_bytes)
        content = _storable(request.adapter_config)
        ttl = request.ttl_seconds
        manifest = self._draft(request.base_model, owner, request.name).model_copy(
            update={
                "lora": LoraConfig(rank=peft.read_config(content).rank),
                "expires_at": now() + timedelta(seconds=ttl) if ttl else None,
                "user_metadata": request.user_metadata,
            }
        )
        return await self._reserve(manifest, content, request.size_bytes, request.project_id)

    async def start_external(self, request: StartExternalUpload, caller: Principal) -> Upload:
        """Start an upload whose configuration is a file of it. Raises as `start`."""
        rank = request.lora_config.rank
        if rank > peft.MAX_RANK:
            raise InvalidRequest(f"lora_config.rank: must be at most {peft.MAX_RANK}, got {rank}")
        await self._check_project(request.destination_project_id, caller)
        draft = self._draft(request.base_model, caller.owner, "uploaded")
        manifest = draft.model_copy(update={"lora": LoraConfig(rank=rank)})
        return await self._reserve(manifest, {}, 0, request.destination_project_id)

    async def _check_project(self, project_id: str | None, caller: Principal) -> None:
        if project_id is not None:
            await self.projects.require_member(project_id, caller)

    def _draft(self, base_model: str, owner: str, name: str) -> CheckpointManifest:
        run_id = str(ModelId(new_session_id(), 0))
        return CheckpointManifest(
            tinker_path=str(CheckpointPath(run_id, CheckpointKind.TRAINING, name)),
            owner=owner,
            base_model=self.training_runs.served(base_model).name,
            lora=None,
            step=0,
            created_at=now(),
            files={},
        )

    async def _reserve(
        self,
        manifest: CheckpointManifest,
        config: dict[str, Any],
        size_bytes: int,
        project_id: str | None,
    ) -> Upload:
        upload = Upload(
            id=ModelId.parse(manifest.path.run_id).session_id,
            owner=manifest.owner,
            project_id=project_id,
            manifest=manifest.model_dump(mode="json"),
            adapter_config=config,
            size_bytes=size_bytes,
            expires_at=now() + _LIFETIME,
        )
        await self.stored_runs.reserve(upload)
        return upload

    def _check_size(self, field: str, size_bytes: int) -> None:
        if size_bytes > self.max_import_bytes:
            raise InvalidRequest(
                f"{field}: an adapter may have at most {self.max_import_bytes} bytes"
                f" (max_import_bytes), got {size_bytes}"
            )

    async def receive(
        self, upload_id: str, caller: Principal, chunks: AsyncIterator[bytes], length: int | None
    ) -> None:
        """Receive the weights of an upload, which replace those that were received before.

        Args:
            upload_id: the upload.
            caller: the caller.
            chunks: the file.
            length: its declared length; only needed if the upload was started without a size.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it is not open, or the file was not received completely.
            Refused: the file is not a LoRA adapter that can be imported; the upload has ended.
        """
        upload = await self._open(upload_id, caller)
        if upload_id in self._receiving:
            raise InvalidRequest(
                f"upload {upload_id!r}: its file is being received; wait until that has ended"
            )
        self._receiving.add(upload_id)
        try:
            size = upload.size_bytes or await self._reserve_room(upload, length)
            await self._receive(upload, chunks, size)
        except Refused as error:
            raise await self._ended(upload, error) from None
        finally:
            self._receiving.discard(upload_id)

    async def _reserve_room(self, upload: Upload, length: int | None) -> int:
        if not length:
            raise InvalidRequest("Content-Length: is required for this upload; send it")
        self._check_size("Content-Length", length)
        limit = self.stored_runs.max_checkpoint_bytes
        await self.stored_runs.checkpoints.check_room(upload.owner, length, limit)
        await self.catalog.set_upload_size(upload.id, length)
        return length

    async def _receive(self, upload: Upload, chunks: AsyncIterator[bytes], size: int) -> None:
        draft = CheckpointManifest.model_validate(upload.manifest)
        body = _Body(chunks, size, _rank(draft))
        manifest = draft.model_copy(update={"data_prefix": f"upload-{uuid.uuid4().hex}"})
        objects = self.stored_runs.objects
        await objects.upload_stream(manifest.key_of(ADAPTER_WEIGHTS), body.checked())
        stored = StoredFile(size_bytes=body.size, sha256=body.digest.hexdigest())
        received = manifest.model_copy(
            update={"files": {ADAPTER_WEIGHTS: stored}, "lora": body.lora}
        )
        await self.catalog.set_manifest(upload.id, received.model_dump(mode="json"))

    async def receive_config(self, upload_id: str, caller: Principal, body: bytes) -> None:
        """Receive the configuration of an upload that was started without one, once.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it has a configuration, or this one cannot be imported.
        """
        upload = await self._open(upload_id, caller)
        try:
            parsed = orjson.loads(body)
        except ValueError:
            raise InvalidRequest(f"{ADAPTER_CONFIG}: is not JSON") from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"{ADAPTER_CONFIG}: expected a JSON object")
        content = _storable(parsed)
        rank, declared = peft.read_config(content).rank, _rank_of(upload)
        if rank != declared:
            raise InvalidRequest(
                f"{ADAPTER_CONFIG}: r: expected {declared}, the rank of lora_config, got {rank}"
            )
        if upload.adapter_config not in ({}, content):
            raise InvalidRequest(
                f"{ADAPTER_CONFIG}: this upload has another one; start another upload"
            )
        await self.catalog.set_adapter_config(upload_id, content)

    async def finish(self, upload_id: str, caller: Principal) -> str:
        """Make a checkpoint of an upload and return its path. Idempotent until it expires.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it has expired, or a file was not received.
            Refused: the adapter does not fit its configuration or its base model; the upload has
                ended.
        """
        upload = await self._visible(upload_id, caller)
        manifest = CheckpointManifest.model_validate(upload.manifest)
        if upload.is_finished:
            return manifest.tinker_path
        await self._open(upload_id, caller)
        await self._check_project(upload.project_id, caller)
        received = {ADAPTER_CONFIG: upload.adapter_config, ADAPTER_WEIGHTS: manifest.files}
        if missing := [name for name, content in received.items() if not content]:
            raise InvalidRequest(
                f"upload {upload_id!r}: {missing[0]} is missing; PUT it before finishing"
            )
        try:
            await self._check_fit(upload, manifest)
        except Refused as error:
            raise await self._ended(upload, error) from None
        config = orjson.dumps(upload.adapter_config, option=orjson.OPT_INDENT_2)
        await self.stored_runs.objects.create(manifest.key_of(ADAPTER_CONFIG), config)
        stored = StoredFile(size_bytes=len(config), sha256=hashlib.sha256(config).hexdigest())
        scale = peft.read_config(upload.adapter_config).scale
        complete = manifest.model_copy(
            update={
                "created_at": now(),
                "files": {**manifest.files, ADAPTER_CONFIG: stored},
                "imported": ImportedAdapter(scale=scale),
            }
        )
        spec = ModelSpec(owner=complete.owner, lora=complete.lora)
        return await self.stored_runs.complete(upload_id, complete, spec)

    async def _check_fit(self, upload: Upload, manifest: CheckpointManifest) -> None:
        served = self.training_runs.served(manifest.base_model)
        folder = Path(served.local_path) if served.local_path else None
        base = await asyncio.to_thread(read_base, folder) if folder else BaseWeights()
        objects, key = self.stored_runs.objects, manifest.key_of(ADAPTER_WEIGHTS)
        size = await objects.read_start(key, peft.LENGTH_BYTES)
        start = size and await objects.read_start(key, peft.header_bytes(size))
        if not start:
            raise InvalidRequest(
                f"upload {upload.id!r}: {ADAPTER_WEIGHTS} is gone from the store; PUT it again"
            )
        with _refusals():
            await asyncio.to_thread(adapter_fit.check, start, upload.adapter_config, base)

    async def abort(self, upload_id: str, caller: Principal) -> None:
        """Delete an upload and what was received.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it is finished or has expired.
        """
        await self._end(await self._open(upload_id, caller))

    async def unfinished(self, caller: Principal) -> Sequence[Upload]:
        """Return the open uploads of the caller's owner, oldest first."""
        return await self.catalog.open_uploads(caller.owner)

    async def _ended(self, upload: Upload, error: Refused) -> Refused:
        await self._end(upload)
        return Refused(f"{error.message}; this upload has ended: start another one")

    async def _end(self, upload: Upload) -> None:
        manifest = CheckpointManifest.model_validate(upload.manifest)
        await self.catalog.forget_upload(upload.id)
        await self.stored_runs.objects.delete_folder(manifest.path.prefix)

    async def _visible(self, upload_id: str, caller: Principal) -> Upload:
        # The ids of copies, which are in the same table, are ids of runs and have colons.
        found = None if ":" in upload_id else await self.catalog.upload(upload_id)
        upload = caller.require(found, f"upload {upload_id!r}")
        caller.named_objects.add(upload_id)
        return upload

    async def _open(self, upload_id: str, caller: Principal) -> Upload:
        upload = await self._visible(upload_id, caller)
        if not is_open(upload, now()):
            raise InvalidRequest(
                f"upload {upload_id!r} is finished or has expired; start another one"
            )
        return upload


def _rank_of(upload: Upload) -> int:
    return _rank(CheckpointManifest.model_validate(upload.manifest))


def _rank(draft: CheckpointManifest) -> int:
    assert draft.lora is not None  # noqa: S101 - every upload starts with a rank
    return draft.lora.rank


def _storable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as it can be stored in every supported database.

    Raises:
        InvalidRequest: it is too long, or has a value that cannot be stored.
    """
    try:
        text = orjson.dumps(config)
    except TypeError as error:
        raise InvalidRequest(
            f"adapter_config: a value can't be stored as JSON ({error}); remove it"
        ) from None
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"adapter_config: it may have at most {MAX_CONFIG_BYTES} bytes of JSON, got {len(text)}"
        )
    if b"\\u0000" in text:
        raise InvalidRequest("adapter_config: contains the character U+0000: remove it")
    stored: dict[str, Any] = orjson.loads(text)
    return stored


@contextmanager
def _refusals() -> Iterator[None]:
    """Mark errors as errors of the content."""
    try:
        yield
    except InvalidRequest as error:
        raise Refused(error.message) from None


class _Body:
    """The file of an upload, which is checked while it is received."""

    def __init__(self, chunks: AsyncIterator[bytes], expected: int, rank: int) -> None:
        self._chunks = chunks
        self._expected = expected
        self._file = AdapterFile(expected, rank)
        self.size = 0
        """Bytes received."""
        self.digest = hashlib.sha256()
        """SHA-256 of what was received."""

    @property
    def lora(self) -> LoraConfig | None:
        """Configuration of the adapter, once the header was read."""
        return self._file.lora

    async def checked(self) -> AsyncIterator[bytes]:
        """Yield the file; each part is yielded only after it was checked.

        Raises:
            InvalidRequest: the file is not a LoRA adapter of the declared size and rank, or a value
                is not finite.
        """
        async for part in self._parts():
            with _refusals():
                checked = await asyncio.to_thread(self._check, part)
            if checked:
                yield checked
        if self.size != self._expected or self.lora is None:
            raise InvalidRequest(
                f"{ADAPTER_WEIGHTS}: received {self.size} bytes of {self._expected}; send the file"
                " again"
            )

    def _check(self, part: bytes) -> bytes:
        self.digest.update(part)
        return self._file.add(part)

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield what is received in parts that are worth a thread."""
        part = bytearray()
        async for chunk in self._received():
            part += chunk
            if len(part) >= _PART_BYTES:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)

    async def _received(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(_CHUNK_SECONDS):
                    chunk = await anext(self._chunks, None)
            except TimeoutError:
                raise InvalidRequest(
                    f"{ADAPTER_WEIGHTS}: no data for {_CHUNK_SECONDS:g} seconds; send it again"
                ) from None
            if chunk is None:
                return
            self.size += len(chunk)
            if self.size > self._expected:
                raise Refused(
                    f"{ADAPTER_WEIGHTS}: larger than the {self._expected} bytes of size_bytes"
                )
            yield chunk
