"""Loads a whole model's weights into an SGLang engine.

Weights that are sent replace the engine's in place, part by part, so that nothing may be drawn
meanwhile; its weight version says so until the last part has arrived.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.client import (
    InferenceClient,
    Json,
    ServerError,
    ServerUnreachable,
)
from tinkercloud_worker.inference.sglang.delivery import Delivery, TransferMethod
from tinkercloud_worker.inference.sglang.tensors import buckets, request_body
from tinkercloud_worker.inference.weight_host import WeightHostLost
from tinkercloud_worker.inference.weights_folder import SavedWeights

log = structlog.get_logger(__name__)

_CALL_SECONDS = 120.0
_WEIGHTS_SECONDS = 1800.0
_DRAIN_SECONDS = 60.0
"""For what still runs in an engine to end; what was given up ends with the step that computes."""
_NOT_FLUSHED = "the cache was not flushed"
"""Part of its message that it has replaced its weights, and kept their version's name."""
_BUCKET_BYTES = 256 << 20
"""Of the tensors in one request, counted once for each rank."""
_MOST_SENT_BYTES = 4 << 30
_WHAT = "whole models"

_GATE_OR_UP = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
"""SGLang makes experts adaptable where one of these and `down_proj` are to be."""

_Update = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Sends something between the beginning and the end of an update."""


class DirectTransfer(Protocol):
    """Transfers whole models to one engine, neither in requests nor by a folder that it sees."""

    way: metrics.Way
    """What it is called in metrics, and in the log."""

    async def join(self, ranks: int) -> None:
        """Prepare for an engine of so many ranks. Raises as `send`."""

    async def send(self, model: SavedWeights, most_bytes: int) -> None:
        """Transfer all tensors of a whole model, in parts, while the engine is in an update.

        Raises:
            NotFound: its weights are gone.
            WeightHostLost: the machine that holds them is.
            InvalidRequest: the engine refuses this method.
            ServerError: it failed, or our side did.
            ServerUnreachable: it is not there.
        """

    async def leave(self) -> None:
        """Drop local state: the engine restarted and left the group."""

    async def close(self) -> None:
        """Disconnect from the engine."""


class SglangWeights:
    """Loads weights into one engine, which draws nothing meanwhile. Belongs to one event loop."""

    def __init__(self, client: InferenceClient, direct: DirectTransfer | None) -> None:
        """Make a loader of weights; the engine is not asked yet.

        Args:
            client: of the engine.
            direct: transfers whole models, if it can; None for requests and files alone.
        """
        self._client = client
        self._delivery = Delivery(client, _WHAT, most_sent_bytes=_MOST_SENT_BYTES)
        self._direct = direct
        self._direct_method = TransferMethod(
            client, _WHAT, "none" if direct is None else direct.way
        )

    async def check_experts(self, model: SavedWeights) -> None:
        """Check that the engine takes a model's experts, if it has any.

        SGLang 0.5.23 looks for experts' weights where they were before it made them adaptable,
        finds none there, and says that it has loaded them.

        Raises:
            InvalidRequest: it would leave experts unchanged.
            ServerError: the engine failed, is not there, or does not say what may be adapted.
            NotFound: somebody has removed the model's folder.
        """
        names = await asyncio.to_thread(model.tensor_names)
        if not any(".experts." in name for name in names):
            return
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        if _adapts_experts(info):
            raise InvalidRequest(
                "this model's sampler is SGLang, which leaves experts as they are where adapters"
                " may adapt them; have --lora-target-modules (sampler.engines.loraTargetModules of"
                " a BaseModel) name no modules of experts, but such as q_proj, k_proj, v_proj,"
                " o_proj and lm_head, or save the model's weights under a name and sample elsewhere"
            )

    async def load(self, model: SavedWeights, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights.

        Args:
            model: a Hugging Face folder.
            version: weight version that the engine then has.
            unfinished: weight version in between.

        Raises:
            ServerError: the engine failed, or is not there; which weights it has is not certain.
            NotFound: somebody has removed the folder.
        """
        await self.drain()
        update = partial(self._update, version=version, unfinished=unfinished)
        if self._direct is not None and self._direct_method.is_enabled:
            direct = self._direct
            try:
                ranks = await self._delivery.ranks()
                await self._direct_method.attempt(
                    lambda: self._send_directly(direct, model, update, ranks)
                )
            except ServerUnreachable:
                raise
            except WeightHostLost as loss:
                log.warning("a whole model goes another way", reason=loss.message)
            except (InvalidRequest, ServerError) as refusal:
                self._direct_method.disable(refusal.message)
            else:
                return
        await asyncio.to_thread(model.fetch)
        await self._delivery.deliver(
            model.size_of(FULL_WEIGHTS),
            send=lambda ranks: self._send(model, update, ranks),
            read=partial(self.load_folder, model.server_dir, version=version, unfinished=unfinished)
            if model.server_dir
            else None,
        )

    async def drain(self) -> None:
        """Wait until nothing runs in the engine, and flush its cache.

        SGLang forgets a request that is given up before the step that computes it has ended. In
        between it refuses to flush its cache, and ends if it is told to release its memory.

        Raises:
            ServerError: something still runs after a minute, or the engine is not there.
        """
        await self._call(f"/flush_cache?timeout={_DRAIN_SECONDS}", {})

    async def set_version(self, version: str) -> None:
        """Set the engine's weight version.

        Raises:
            ServerError: the engine failed, or is not there.
        """
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("/update_weight_version", body)

    async def forget(self) -> None:
        """Drop local state: the engine restarted, is in no group, and may refuse less."""
        if self._direct is not None:
            await self._direct.leave()
            self._direct_method.re_enable()

    async def close(self) -> None:
        """Disconnect from the engine."""
        if self._direct is not None:
            await self._direct.close()

    async def load_folder(self, folder: Path, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights by those of a folder, as the engine sees it.

        Args:
            folder: a Hugging Face folder.
            version: weight version that the engine then has.
            unfinished: weight version in between.

        Raises:
            ServerError: the engine failed, or is not there; which weights it has is not certain.
        """
        await self.drain()
        # If it refuses it may have replaced its weights all the same, under the version before.
        await self.set_version(unfinished)
        # Keys and values of a prompt belong to the weights they were computed with.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        with metrics.loading(self._client.url, "model", "file"):
            try:
                await self._call("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)
            except ServerError as error:
                if _NOT_FLUSHED not in error.message:
                    raise
                # Something has begun since the engine was drained, such as a probe of its health.
                await self.drain()
                await self._call("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)

    async def _send_directly(
        self, direct: DirectTransfer, model: SavedWeights, update: _Update, ranks: int
    ) -> None:
        with metrics.loading(self._client.url, "model", direct.way):
            await direct.join(ranks)
            await update(lambda: direct.send(model, _BUCKET_BYTES))

    async def _send(self, model: SavedWeights, update: _Update, ranks: int) -> None:
        with metrics.loading(self._client.url, "model", "request"):
            await update(lambda: self._send_parts(model, ranks))

    async def _update(
        self, send: Callable[[], Awaitable[None]], *, version: str, unfinished: str
    ) -> None:
        """Replace the engine's weights part by part; its version says so meanwhile."""
        await self.set_version(unfinished)
        await self._begin()
        try:
            await send()
        except ServerUnreachable:
            # The next update ends the one that is open.
            raise
        except BaseException:
            await self._call("/end_weight_update", {})
            raise
        await self._call("/end_weight_update", {})
        await self.set_version(version)

    async def _begin(self) -> None:
        try:
            await self._call("/begin_weight_update", {})
        except ServerError as error:
            if "already open" not in error.message:
                raise
            # Another process began it and has ended.
            await self._call("/end_weight_update", {})
            await self._call("/begin_weight_update", {})

    async def _send_parts(self, model: SavedWeights, ranks: int) -> None:
        parts = buckets(model.local_dir / FULL_WEIGHTS, _BUCKET_BYTES // ranks)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            body = await asyncio.to_thread(request_body, {"flush_cache": True}, part, ranks)
            await self._call("/update_weights_from_tensor", body, seconds=_WEIGHTS_SECONDS)

    async def _call(self, path: str, body: Json | bytes, *, seconds: float = _CALL_SECONDS) -> None:
        await self._client.command(path, body, seconds=seconds)


def _adapts_experts(info: Json) -> bool:
    """Return whether adapters may adapt experts of an engine.

    Args:
        info: what it says of itself (`/server_info`).
    """
    if not info.get("enable_lora"):
        return False
    targets = set(info.get("lora_target_modules") or ["all"])
    return "all" in targets or ("down_proj" in targets and not _GATE_OR_UP.isdisjoint(targets))
