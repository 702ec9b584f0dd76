"""Loads adapters into an SGLang engine, and unloads them."""

import asyncio
import json
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from tinkercloud_protocol.heads.checkpoint_manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.sglang.delivery import Delivery
from tinkercloud_worker.inference.sglang.encoded_tensors import request_body
from tinkercloud_worker.inference.weights_folder import SavedWeights

_SECONDS = 600.0
_MAX_SENT_BYTES = 512 << 20


class SglangAdapters:
    """The adapters of one engine. Belongs to one event loop."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._delivery = Delivery(client, "adapters", most_sent_bytes=_MAX_SENT_BYTES)
        # SGLang loads adapters one at a time too, and waiting bodies would fill this process's
        # memory.
        self._sending = asyncio.Lock()

    async def load(self, adapter: SavedWeights) -> None:
        """Load an adapter, unless it is loaded.

        Raises:
            InvalidRequest: the engine does not support the adapter.
            ServerError: the engine failed, or is unreachable.
            NotFound: the files were removed.
        """
        await self._delivery.deliver(
            adapter.size_of(ADAPTER_WEIGHTS),
            send=lambda ranks: self._send(adapter, ranks),
            read=partial(self._read, adapter.name, adapter.server_dir)
            if adapter.server_dir
            else None,
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter, which may be unknown, once its requests have ended."""
        try:
            await self._client.post("/unload_lora_adapter", {"lora_name": name}, seconds=_SECONDS)
        except InvalidRequest as error:
            if "does not exist" not in error.message and "not loaded" not in error.message:
                raise

    async def _send(self, adapter: SavedWeights, ranks: int) -> None:
        async with self._sending:
            with metrics.loading(self._client.url, "adapter", "request"):
                body = await asyncio.to_thread(_load_request, adapter, ranks)
                await self._load("/load_lora_adapter_from_tensors", body)

    async def _read(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        with metrics.loading(self._client.url, "adapter", "file"):
            await self._load("/load_lora_adapter", body)

    async def _load(self, path: str, body: dict[str, str] | bytes) -> None:
        try:
            await self._client.post(path, body, seconds=_SECONDS)
        except InvalidRequest as error:
            if "already loaded" not in error.message:
                raise


def _load_request(adapter: SavedWeights, ranks: int) -> bytes:
    tensors = load_file(adapter.local_dir / ADAPTER_WEIGHTS)
    config = json.loads((adapter.local_dir / ADAPTER_CONFIG).read_bytes())
    return request_body({"lora_name": adapter.name, "config_dict": config}, tensors, ranks)
