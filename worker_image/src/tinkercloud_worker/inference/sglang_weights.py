"""How a whole model's weights get into an SGLang engine: in requests, or from a folder it sees.

Weights that are sent replace those in place, part by part, so an engine to which that is happening
has no weights that anything may be drawn from, and is marked so until the last part is there.
"""

import asyncio
from pathlib import Path

import structlog

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.adapters import Written
from tinkercloud_worker.inference.client import (
    InferenceClient,
    Json,
    ServerError,
    ServerUnreachable,
)
from tinkercloud_worker.inference.sglang_adapters import tensor_ranks
from tinkercloud_worker.inference.sglang_tensors import TensorRoute, buckets, request_body

log = structlog.get_logger(__name__)

_CALL_SECONDS = 120.0
_WEIGHTS_SECONDS = 1800.0
_BUCKET_BYTES = 256 << 20
"""Of the tensors in one request, counted once for each rank."""
_MOST_BYTES = 4 << 30
"""Of a model that is sent, counted likewise: base64 in JSON is slower than any file."""


class SglangWeights:
    """Of one engine, which draws nothing meanwhile. Belongs to one event loop."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._route = TensorRoute(client.url, "whole models")

    async def load(self, model: Written, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights.

        Args:
            model: a Hugging Face folder.
            version: what the engine then says its weights are.
            unfinished: what it says in between.

        Raises:
            ServerError: the engine failed, or is not there; which weights it has is not certain.
        """
        try:
            is_loaded = await self._send(model, version, unfinished)
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await self.load_folder(str(model.there), version=version)
            self._route.close(refusal.message)
            return
        if not is_loaded:
            await self.load_folder(str(model.there), version=version)

    async def load_folder(self, folder: str, *, version: str) -> None:
        """Replace the engine's weights by those of a folder, as the engine sees it.

        Raises:
            ServerError: the engine failed, or is not there.
        """
        # Keys and values of a prompt belong to the weights they were computed with.
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        try:
            with metrics.loading(self._client.url, "model", "file"):
                await self._client.post("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)
        except InvalidRequest as error:
            raise ServerError(
                f"{self._client.url} could not load {folder}: {error.message}"
            ) from None

    async def _send(self, model: Written, version: str, unfinished: str) -> bool:
        """Return whether the engine has been sent the weights; if not, it is one for folders."""
        if not self._route.is_open:
            return False
        ranks = await tensor_ranks(self._client)
        if model.size_of(FULL_WEIGHTS) * ranks > _MOST_BYTES:
            return False
        with metrics.loading(self._client.url, "model", "request"):
            await self._mark(unfinished)
            await self._begin()
            try:
                with self._route.used():
                    await self._send_parts(model.here / FULL_WEIGHTS, ranks)
            finally:
                await self._call("/end_weight_update", {})
            await self._mark(version)
        return True

    async def _begin(self) -> None:
        try:
            await self._call("/begin_weight_update", {})
        except InvalidRequest as error:
            if "already open" not in error.message:
                raise
            # Whoever began it has gone.
            await self._call("/end_weight_update", {})
            await self._call("/begin_weight_update", {})

    async def _send_parts(self, file: Path, ranks: int) -> None:
        parts = buckets(file, _BUCKET_BYTES // ranks)
        fields = {"flush_cache": True}
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            body = await asyncio.to_thread(request_body, fields, part, ranks)
            await self._client.post("/update_weights_from_tensor", body, seconds=_WEIGHTS_SECONDS)

    async def _mark(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("/update_weight_version", body)

    async def _call(self, path: str, body: Json) -> None:
        await self._client.post(path, body, seconds=_CALL_SECONDS)
