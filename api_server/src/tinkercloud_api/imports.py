"""Imports adapters of Hugging Face PEFT as training checkpoints, in three steps.

`start` checks the configuration and reserves room, `receive` streams `adapter_model.safetensors`
into the store and checks its header before the first tensor, and `finish` writes the manifest. An
upload that is not finished before it expires is deleted.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import orjson
from pydantic import Field

from tinkercloud_api.auth import Principal, Role
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import Upload, now
from tinkercloud_api.stored_runs import StoredRuns, is_open
from tinkercloud_api.training_runs import TrainingRuns
from tinkercloud_protocol import peft
from tinkercloud_protocol.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    IMPORTED_VERSION,
    CheckpointManifest,
    ImportedAdapter,
    StoredFile,
)
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_protocol.ids import ModelId, new_session_id
from tinkercloud_protocol.launch import ModelSpec
from tinkercloud_protocol.paths import CheckpointKind, CheckpointPath
from tinkercloud_protocol.wire import Name, TtlSeconds, UserMetadata, WireModel

_LIFETIME = timedelta(hours=1)
"""Time to send the file and to finish."""
_CHUNK_SECONDS = 60.0
"""Maximum time between two parts of a body."""
_MAX_CONFIG_BYTES = 64 << 10


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


@dataclass(frozen=True, slots=True)
class Imports:
    """Imports adapters. Belongs to one event loop."""

    catalog: Catalog
    training_runs: TrainingRuns
    stored_runs: StoredRuns
    max_import_bytes: int
    _receiving: set[str] = field(default_factory=set)
    """Uploads whose file is being received."""

    async def start(self, request: StartUpload, caller: Principal) -> Upload:
        """Start an upload.

        Raises:
            InvalidRequest: the adapter cannot be imported, or there is no quota for it.
            Overloaded: the owner has too many unfinished uploads and copies.
        """
        owner = request.owner or caller.owner
        if owner != caller.owner and caller.role is not Role.ADMIN:
            raise InvalidRequest(
                f"owner: only an admin may import for another owner (got {owner!r}); omit it"
            )
        if request.size_bytes > self.max_import_bytes:
            raise InvalidRequest(
                f"size_bytes: an adapter may have at most {self.max_import_bytes} bytes"
                f" (max_import_bytes), got {request.size_bytes}"
            )
        base_model = self.training_runs.served(request.base_model).name
        content = _storable(request.adapter_config)
        config = peft.read_config(content)
        upload_id, moment = new_session_id(), now()
        path = CheckpointPath(str(ModelId(upload_id, 0)), CheckpointKind.TRAINING, request.name)
        ttl = request.ttl_seconds
        manifest = CheckpointManifest(
            format_version=IMPORTED_VERSION,
            tinker_path=str(path),
            owner=owner,
            base_model=base_model,
            lora=LoraConfig(rank=config.rank),
            step=0,
            created_at=moment,
            expires_at=moment + timedelta(seconds=ttl) if ttl else None,
            user_metadata=request.user_metadata,
            imported=ImportedAdapter(scale=config.scale),
            files={},
        )
        upload = Upload(
            id=upload_id,
            owner=owner,
            project_id=request.project_id,
            manifest=manifest.model_dump(mode="json"),
            adapter_config=content,
            size_bytes=request.size_bytes,
            expires_at=moment + _LIFETIME,
        )
        await self.stored_runs.reserve(upload)
        return upload

    async def receive(
        self, upload_id: str, caller: Principal, chunks: AsyncIterator[bytes]
    ) -> None:
        """Receive the file of an upload, which replaces one that was received before.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it is not open, or the file is not a LoRA adapter that can be imported.
        """
        upload = await self._open(upload_id, caller)
        if upload_id in self._receiving:
            raise InvalidRequest(
                f"upload {upload_id!r}: its file is being received; wait until that has ended"
            )
        self._receiving.add(upload_id)
        try:
            await self._receive(upload, chunks)
        finally:
            self._receiving.discard(upload_id)

    async def _receive(self, upload: Upload, chunks: AsyncIterator[bytes]) -> None:
        draft = CheckpointManifest.model_validate(upload.manifest)
        config = orjson.dumps(upload.adapter_config, option=orjson.OPT_INDENT_2)
        body = _Body(chunks, upload.size_bytes, peft.read_config(upload.adapter_config).rank)
        manifest = draft.model_copy(update={"data_prefix": f"upload-{uuid.uuid4().hex}"})
        objects = self.stored_runs.objects
        await objects.upload_stream(manifest.key_of(ADAPTER_WEIGHTS), body.checked())
        await objects.create(manifest.key_of(ADAPTER_CONFIG), config)
        files = {
            ADAPTER_WEIGHTS: StoredFile(size_bytes=body.size, sha256=body.digest.hexdigest()),
            ADAPTER_CONFIG: StoredFile(
                size_bytes=len(config), sha256=hashlib.sha256(config).hexdigest()
            ),
        }
        complete = manifest.model_copy(update={"files": files, "lora": body.lora})
        await self.catalog.set_manifest(upload.id, complete.model_dump(mode="json"))

    async def finish(self, upload_id: str, caller: Principal) -> str:
        """Make a checkpoint of an upload and return its path. Idempotent until it expires.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it has expired, or its file was not received.
        """
        upload = await self._visible(upload_id, caller)
        manifest = CheckpointManifest.model_validate(upload.manifest)
        if upload.is_finished:
            return manifest.tinker_path
        await self._open(upload_id, caller)
        if not manifest.files:
            raise InvalidRequest(
                f"upload {upload_id!r}: {ADAPTER_WEIGHTS} is missing; PUT it before finishing"
            )
        manifest = manifest.model_copy(update={"created_at": now()})
        return await self.stored_runs.complete(
            upload_id, manifest, ModelSpec(owner=manifest.owner, lora=manifest.lora)
        )

    async def abort(self, upload_id: str, caller: Principal) -> None:
        """Delete an upload and what was received.

        Raises:
            NotFound: the upload does not exist for this principal.
            InvalidRequest: it is finished or has expired.
        """
        upload = await self._open(upload_id, caller)
        manifest = CheckpointManifest.model_validate(upload.manifest)
        await self.catalog.forget_upload(upload_id)
        await self.stored_runs.objects.delete_folder(manifest.path.prefix)

    async def _visible(self, upload_id: str, caller: Principal) -> Upload:
        found = await self.catalog.upload(upload_id)
        upload = caller.require(found, f"upload {upload_id!r}")
        if not upload.adapter_config:
            raise NotFound(f"upload {upload_id!r} does not exist, or belongs to another owner")
        return upload

    async def _open(self, upload_id: str, caller: Principal) -> Upload:
        upload = await self._visible(upload_id, caller)
        if not is_open(upload, now()):
            raise InvalidRequest(
                f"upload {upload_id!r} is finished or has expired; start another one"
            )
        return upload


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
    if len(text) > _MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"adapter_config: it may have at most {_MAX_CONFIG_BYTES} bytes of JSON, got"
            f" {len(text)}"
        )
    if b"\\u0000" in text:
        raise InvalidRequest("adapter_config: contains the character U+0000: remove it")
    stored: dict[str, Any] = orjson.loads(text)
    return stored


class _Body:
    """The file of an upload, which is checked while it is received."""

    def __init__(self, chunks: AsyncIterator[bytes], expected: int, rank: int) -> None:
        self._chunks = chunks
        self._expected = expected
        self._rank = rank
        self.size = 0
        """Bytes received."""
        self.digest = hashlib.sha256()
        """SHA-256 of what was received."""
        self.lora = LoraConfig(rank=rank)
        """Configuration of the adapter, once the header was read."""

    async def checked(self) -> AsyncIterator[bytes]:
        """Yield the file; the header is yielded only after it was checked.

        Raises:
            InvalidRequest: the file is not a LoRA adapter of the declared size and rank.
        """
        start, header = bytearray(), None
        async for chunk in self._received():
            if header is None or start:
                start += chunk
                if header is None and len(start) >= peft.LENGTH_BYTES:
                    header = peft.header_bytes(bytes(start[: peft.LENGTH_BYTES]))
                if header is not None and len(start) >= header:
                    self.lora = await asyncio.to_thread(
                        peft.read_header, bytes(start[:header]), self._expected, self._rank
                    )
                    yield bytes(start)
                    start.clear()
            else:
                yield chunk
        if self.size != self._expected or start or header is None:
            raise InvalidRequest(
                f"{ADAPTER_WEIGHTS}: received {self.size} bytes of {self._expected}; send the file"
                " again"
            )

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
                raise InvalidRequest(
                    f"{ADAPTER_WEIGHTS}: larger than the {self._expected} bytes of size_bytes"
                )
            self.digest.update(chunk)
            yield chunk
