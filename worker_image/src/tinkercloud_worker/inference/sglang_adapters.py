"""How adapters get into an SGLang engine: in the request itself, or by a folder it sees.

An engine that has no such request, or refuses what it then takes as files, gets files from then on.
"""

import asyncio
import json

from safetensors.torch import load_file

from tinkercloud_protocol.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.adapters import Written
from tinkercloud_worker.inference.client import (
    InferenceClient,
    NotThere,
    ServerError,
    ServerUnreachable,
)
from tinkercloud_worker.inference.sglang_tensors import TensorRoute, request_body

_SECONDS = 600.0
_CALL_SECONDS = 60.0
_MOST_BYTES = 512 << 20
"""Of the tensors in one request, counted once for each rank; more goes by files."""


class SglangAdapters:
    """Of one engine. Belongs to one event loop."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._route = TensorRoute(client.url, "adapters")
        # SGLang loads them one by one too, and bodies that wait for it would fill this process.
        self._sending = asyncio.Lock()

    async def load(self, adapter: Written) -> None:
        """Load an adapter. It may be loaded already.

        Raises:
            InvalidRequest: the engine does not take such an adapter.
            ServerError: the engine failed, or is not there.
        """
        try:
            is_loaded = await self._send(adapter)
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await self._load_refused(adapter, refusal)
            return
        if not is_loaded:
            await self._load_file(adapter)

    async def unload(self, name: str) -> None:
        """Forget an adapter, once its requests have ended. It may be unknown."""
        try:
            await self._client.post("/unload_lora_adapter", {"lora_name": name}, seconds=_SECONDS)
        except InvalidRequest as error:
            if "does not exist" not in error.message and "not loaded" not in error.message:
                raise

    async def _send(self, adapter: Written) -> bool:
        """Return whether the engine has been sent the adapter; if not, it is one for files."""
        if not self._route.is_open:
            return False
        ranks = await tensor_ranks(self._client)
        if adapter.size_of(ADAPTER_WEIGHTS) * ranks > _MOST_BYTES:
            return False
        async with self._sending:
            with metrics.loading(self._client.url, "adapter", "request"), self._route.used():
                body = await asyncio.to_thread(_load_request, adapter, ranks)
                await self._load("/load_lora_adapter_from_tensors", body)
        return True

    async def _load_refused(self, adapter: Written, refusal: InvalidRequest | ServerError) -> None:
        """Load the files of what was refused as tensors; what is refused twice is at fault."""
        try:
            await self._load_file(adapter)
        except InvalidRequest as error:
            raise (error if isinstance(refusal, NotThere) else refusal) from None
        self._route.close(refusal.message)

    async def _load_file(self, adapter: Written) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.there)}
        with metrics.loading(self._client.url, "adapter", "file"):
            await self._load("/load_lora_adapter", body)

    async def _load(self, path: str, body: dict[str, str] | bytes) -> None:
        try:
            await self._client.post(path, body, seconds=_SECONDS)
        except InvalidRequest as error:
            if "already loaded" not in error.message:
                raise


async def tensor_ranks(client: InferenceClient) -> int:
    """Return how many copies of tensors an engine wants in a request: one for each rank.

    Raises:
        NotThere: it does not say; with too few it would end.
        ServerError: it failed, or is not there.
    """
    info = await client.get("/server_info", seconds=_CALL_SECONDS)
    ranks = info.get("tp_size")
    if not isinstance(ranks, int):
        raise NotThere(f"{client.url}/server_info does not say how many ranks there are: {ranks!r}")
    return ranks


def _load_request(adapter: Written, ranks: int) -> bytes:
    tensors = load_file(adapter.here / ADAPTER_WEIGHTS)
    config = json.loads((adapter.here / ADAPTER_CONFIG).read_bytes())
    return request_body({"lora_name": adapter.name, "config_dict": config}, tensors, ranks)
