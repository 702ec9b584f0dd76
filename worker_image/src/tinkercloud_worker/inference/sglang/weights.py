"""Loads the weights of a full model into an SGLang engine.

The weights replace the engine's in place, part by part, so it must not generate meanwhile; its
weight version marks the update as unfinished until the last part has arrived.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.client import (
    InferenceClient,
    Json,
    ServerError,
    ServerUnreachable,
)
from tinkercloud_worker.inference.sglang.delivery import Delivery, TransferMethod
from tinkercloud_worker.inference.sglang.encoded_tensors import buckets, request_body
from tinkercloud_worker.inference.sglang.process_group import SglangGroup
from tinkercloud_worker.inference.weight_host import WeightHostLost
from tinkercloud_worker.inference.weights_folder import SavedWeights

log = structlog.get_logger(__name__)

_CALL_SECONDS = 120.0
_WEIGHTS_SECONDS = 1800.0
_DRAIN_SECONDS = 60.0
"""Time for running requests to end; aborted ones end with the current step."""
_NOT_FLUSHED = "the cache was not flushed"
"""Part of SGLang's message that it has replaced the weights, but not their version."""
_BUCKET_BYTES = 256 << 20
"""Size of the tensors in one request, counted once for each rank."""
_MAX_SENT_BYTES = 4 << 30
_WHAT = "full models"

_GATE_OR_UP = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
"""SGLang makes experts adaptable if one of these and `down_proj` are target modules."""

_Update = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs a transfer between the begin and the end of an update."""


class SglangWeights:
    """Loads weights into one engine, which generates nothing meanwhile. For one event loop."""

    def __init__(self, client: InferenceClient, group: SglangGroup | None) -> None:
        """Create a loader without calling the engine.

        Args:
            client: client of the engine.
            group: process group with the engine, the preferred transfer of full models; None to use
                only requests and files.
        """
        self._client = client
        self._delivery = Delivery(client, _WHAT, most_sent_bytes=_MAX_SENT_BYTES)
        self._group = group
        self._group_method = TransferMethod(client, _WHAT, "group")

    async def check_experts(self, model: SavedWeights) -> None:
        """Check that the engine can load a model's experts, if it has any.

        SGLang 0.5.23 looks for the weights of adaptable experts at their old location, finds none,
        and reports success.

        Raises:
            InvalidRequest: the engine would leave experts unchanged.
            ServerError: the engine failed, is unreachable, or does not report its target modules.
            NotFound: the model's folder was removed.
        """
        names = await asyncio.to_thread(model.tensor_names)
        if not any(".experts." in name for name in names):
            return
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        if _adapts_experts(info):
            raise InvalidRequest(
                "this model's sampler is SGLang, which does not update experts that adapters may"
                " target; remove the modules of experts from --lora-target-modules"
                " (sampler.engines.loraTargetModules of a BaseModel), leaving for example q_proj,"
                " k_proj, v_proj, o_proj and lm_head, or save the model's weights with a name and"
                " sample from them elsewhere"
            )

    async def load(self, model: SavedWeights, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights.

        Args:
            model: a Hugging Face folder.
            version: weight version after the update.
            unfinished: weight version during the update.

        Raises:
            ServerError: the engine failed, or is unreachable; its weights are unknown then.
            NotFound: the folder was removed.
        """
        await self.drain()
        update = partial(self._update, version=version, unfinished=unfinished)
        if self._group is not None and self._group_method.is_enabled:
            group = self._group
            try:
                ranks = await self._delivery.ranks()
                await self._group_method.attempt(
                    lambda: self._broadcast(group, model, update, ranks)
                )
            except ServerUnreachable:
                raise
            except WeightHostLost as loss:
                log.warning("broadcast of a model failed; falling back", reason=loss.message)
            except (InvalidRequest, ServerError) as refusal:
                self._group_method.disable(refusal.message)
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

        SGLang forgets an aborted request before the step that computes it has ended. In between it
        refuses to flush its cache, and crashes if it is asked to release its memory.

        Raises:
            ServerError: a request still runs after a minute, or the engine is unreachable.
        """
        await self._call(f"/flush_cache?timeout={_DRAIN_SECONDS}", {})

    async def set_version(self, version: str) -> None:
        """Set the engine's weight version.

        Raises:
            ServerError: the engine failed, or is unreachable.
        """
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("/update_weight_version", body)

    async def forget(self) -> None:
        """Reset local state after a restart of the engine, which is in no group then."""
        if self._group is not None:
            await self._group.leave()
            self._group_method.re_enable()

    async def close(self) -> None:
        """Disconnect from the engine."""
        if self._group is not None:
            await self._group.close()

    async def load_folder(self, folder: Path, *, version: str, unfinished: str) -> None:
        """Replace the engine's weights by those of a folder.

        Args:
            folder: path of a Hugging Face folder in the engine.
            version: weight version after the update.
            unfinished: weight version during the update.

        Raises:
            ServerError: the engine failed, or is unreachable; its weights are unknown then.
        """
        await self.drain()
        # If it reports an error, it may still have replaced its weights, under the old version.
        await self.set_version(unfinished)
        # Cached keys and values are only valid for the weights they were computed with.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        with metrics.loading(self._client.url, "model", "file"):
            try:
                await self._call("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)
            except ServerError as error:
                if _NOT_FLUSHED not in error.message:
                    raise
                # A request has started since the engine was drained, such as a health check.
                await self.drain()
                await self._call("/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS)

    async def _broadcast(
        self, group: SglangGroup, model: SavedWeights, update: _Update, ranks: int
    ) -> None:
        with metrics.loading(self._client.url, "model", "group"):
            await group.join(ranks)
            await update(lambda: group.send(model, _BUCKET_BYTES))

    async def _send(self, model: SavedWeights, update: _Update, ranks: int) -> None:
        with metrics.loading(self._client.url, "model", "request"):
            await update(lambda: self._send_parts(model, ranks))

    async def _update(
        self, send: Callable[[], Awaitable[None]], *, version: str, unfinished: str
    ) -> None:
        """Replace the engine's weights part by part, marked as unfinished in its version."""
        await self.set_version(unfinished)
        await self._begin()
        try:
            await send()
        except ServerUnreachable:
            # The next update ends this one.
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
            # A process that has ended left the update open.
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
    """Return whether adapters may target experts in an engine.

    Args:
        info: the engine's `/server_info`.
    """
    if not info.get("enable_lora"):
        return False
    targets = set(info.get("lora_target_modules") or ["all"])
    return "all" in targets or ("down_proj" in targets and not _GATE_OR_UP.isdisjoint(targets))
