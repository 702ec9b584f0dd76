"""How a whole model's weights get into an SGLang engine.

Weights that are sent replace those in place, part by part, so an engine to which that is happening
has no weights that anything may be drawn from, and is marked so until the last part is there.
"""

import asyncio
from functools import partial
from pathlib import Path

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.adapters import Written
from tinkercloud_worker.inference.client import InferenceClient, Json, ServerError
from tinkercloud_worker.inference.sglang_delivery import Delivery
from tinkercloud_worker.inference.sglang_tensors import buckets, request_body

_CALL_SECONDS = 120.0
_WEIGHTS_SECONDS = 1800.0
_BUCKET_BYTES = 256 << 20
"""Of the tensors in one request, counted once for each rank."""
_MOST_SENT_BYTES = 4 << 30


class SglangWeights:
    """Of one engine, which draws nothing meanwhile. Belongs to one event loop."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._delivery = Delivery(client, "whole models", most_sent_bytes=_MOST_SENT_BYTES)

    async def load(self, model: Written, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights.

        Args:
            model: a Hugging Face folder.
            version: what the engine then says its weights are.
            unfinished: what it says in between.

        Raises:
            ServerError: the engine failed, or is not there; which weights it has is not certain.
            NotFound: somebody has removed the folder.
        """
        await self._delivery.deliver(
            model.size_of(FULL_WEIGHTS),
            send=lambda ranks: self._send(model, ranks, version=version, unfinished=unfinished),
            read=partial(self.load_folder, model.there, version=version) if model.there else None,
        )

    async def load_folder(self, folder: Path, *, version: str) -> None:
        """Replace the engine's weights by those of a folder, as the engine sees it.

        Raises:
            ServerError: the engine failed, or is not there.
        """
        # Keys and values of a prompt belong to the weights they were computed with.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        with metrics.loading(self._client.url, "model", "file"):
            await self._call("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)

    async def _send(self, model: Written, ranks: int, *, version: str, unfinished: str) -> None:
        with metrics.loading(self._client.url, "model", "request"):
            await self._mark(unfinished)
            await self._begin()
            try:
                await self._send_parts(model, ranks)
            finally:
                await self._call("/end_weight_update", {})
            await self._mark(version)

    async def _begin(self) -> None:
        try:
            await self._call("/begin_weight_update", {})
        except ServerError as error:
            if "already open" not in error.message:
                raise
            # Whoever began it has gone.
            await self._call("/end_weight_update", {})
            await self._call("/begin_weight_update", {})

    async def _send_parts(self, model: Written, ranks: int) -> None:
        parts = buckets(model.here / FULL_WEIGHTS, _BUCKET_BYTES // ranks)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            body = await asyncio.to_thread(request_body, {"flush_cache": True}, part, ranks)
            await self._call("/update_weights_from_tensor", body, seconds=_WEIGHTS_SECONDS)

    async def _mark(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("/update_weight_version", body)

    async def _call(self, path: str, body: Json | bytes, *, seconds: float = _CALL_SECONDS) -> None:
        try:
            await self._client.post(path, body, seconds=seconds)
        except InvalidRequest as error:
            # Nothing of this is in a user's hands.
            raise ServerError(f"{self._client.url}{path}: {error.message}") from None
