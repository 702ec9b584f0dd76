"""Controls the memory and the base weights of SGLang engines that belong to this head.

Engines that share GPUs with the trainer are started with `--enable-memory-saver` and
`--enable-weights-cpu-backup`: without the second, weights are lost when memory is released.

The weight version of an engine identifies its weights and the head that loaded them. Every response
includes it, so responses from other weights are never used, and a restarted engine is recognized by
SGLang's default version. The version also says whether the engine has released its memory, so that
the next head resumes it, and never twice.
"""

from pathlib import Path

from tinkercloud_worker import metrics
from tinkercloud_worker.inference.client import Json, ServerError, ServerUnreachable
from tinkercloud_worker.inference.server_modes import ModeSwitch
from tinkercloud_worker.inference.sglang.process_group import SglangGroup
from tinkercloud_worker.inference.sglang.sglang_dialect import RELEASED, SglangDialect
from tinkercloud_worker.inference.sglang.weights import SglangWeights
from tinkercloud_worker.inference.weights_folder import WeightsFolder

BASE = "base"
"""Mode with the base model's own weights, and adapters on top of them."""
TRAINING = "training"
"""Mode in which a trainer that shares the engine's GPUs has their memory."""

_DEFAULT_VERSION = "default"
"""SGLang's version of the weights that it starts with."""
_UNFINISHED = "unfinished"
"""Name of the weights while an update is in progress."""
_WEIGHTS, _CACHE, _GRAPHS = "weights", "kv_cache", "cuda_graph"
_CALL_SECONDS = 120.0
_MEMORY_SECONDS = 900.0
"""Time for an engine to copy its weights out of GPU memory, at first to pages that it must pin."""


class SglangControl:
    """Controls one engine. Its modes are BASE, TRAINING and the names of full models."""

    def __init__(
        self,
        dialect: SglangDialect,
        folder: WeightsFolder,
        *,
        owner: str,
        base_path: str,
        group: SglangGroup | None,
    ) -> None:
        """Create a control without calling the engine.

        Args:
            dialect: dialect of the engine.
            folder: where full models are.
            owner: unique name of this process among all that ever control the engine.
            base_path: folder of the base model, until the engine has reported it.
            group: process group with the engine; None to use only requests and files.
        """
        self._dialect = dialect
        self._weights = SglangWeights(dialect.client, group)
        self._folder = folder
        self._owner = owner
        self._base_path = base_path
        self._held: str | None = None
        """Mode whose weights it has; None for weights of another process."""
        self._is_released: bool | None = False
        """None while it is releasing or resuming its memory, or if that failed."""
        self._version = _DEFAULT_VERSION
        """Its weight version, without the suffix of released memory."""
        self._is_known = False
        metrics.ENGINE_RESTARTS.labels(dialect.client.url)
        self.modes = ModeSwitch(self._switch, None)

    def invalidate(self) -> None:
        """Mark the engine's state as unknown: it may have restarted, or have other weights."""
        self.modes.reset(None)

    def invalidate_if_idle(self) -> None:
        """Mark the state as unknown, unless work is running: the engine may have restarted."""
        if self.modes.is_idle:
            self.modes.reset(None)

    async def close(self) -> None:
        """Disconnect from the engine."""
        await self._weights.close()

    async def _switch(self, mode: str) -> None:
        # It may have restarted since the last call.
        await self._read_state()
        if mode == TRAINING:
            await self._release()
            return
        await self._resume()
        if mode != self._held:
            await self._load(mode)

    async def _read_state(self) -> None:
        info = await self._dialect.model_info()
        reported = str(info["weight_version"])
        self._version = reported.removesuffix(RELEASED)
        is_suffixed = reported != self._version
        self._is_released = (self._is_released or None) if is_suffixed else False
        owner, _, held = self._version.rpartition("/")
        if reported == _DEFAULT_VERSION:
            if self._is_known:
                metrics.ENGINE_RESTARTS.labels(self._dialect.client.url).inc()
            await self._weights.forget()
            self._base_path = str(info["model_path"])
            self._held = BASE
            self._version = self._version_tag(BASE)
            await self._weights.set_version(self._version)
        else:
            self._held = held if owner == self._owner else None
        self._dialect.weight_version = self._version_tag(self._held) if self._held else None
        self._is_known = True

    async def _release(self) -> None:
        if self._is_released:
            return
        # The head that set the suffix may have been killed before the engine released its memory.
        await self._resume()
        # The version is set first. If this head is killed in between, the next head finds a version
        # that does not match the memory; its calls then crash the engine, which restarts.
        await self._weights.set_version(self._version + RELEASED)
        self._is_released = None
        # An engine that releases its memory while requests run crashes. Pausing aborts them, but a
        # step that computes them may still be running.
        await self._call("/pause_generation", {"mode": "abort"})
        try:
            await self._weights.drain()
        except ServerUnreachable:
            raise
        except ServerError:
            await self._continue()
            raise
        await self._call(
            "/release_memory_occupation", {"tags": [_CACHE, _WEIGHTS, _GRAPHS]}, _MEMORY_SECONDS
        )
        self._is_released = True

    async def _resume(self) -> None:
        if self._is_released is False:
            return
        self._is_released = None
        await self._call(
            "/resume_memory_occupation", {"tags": [_WEIGHTS, _CACHE, _GRAPHS]}, _MEMORY_SECONDS
        )
        await self._continue()

    async def _continue(self) -> None:
        """Resume generation in an engine that has its memory."""
        # The suffix is removed last: without it, a paused engine counts as unhealthy.
        await self._call("/continue_generation", {})
        await self._weights.set_version(self._version)
        self._is_released = False

    async def _load(self, mode: str) -> None:
        version, unfinished = self._version_tag(mode), self._version_tag(_UNFINISHED)
        if mode == BASE:
            self._held = None
            await self._weights.load_folder(
                Path(self._base_path), version=version, unfinished=unfinished
            )
        else:
            model = self._folder.find(mode)
            await self._weights.check_experts(model)
            self._held = None
            await self._weights.load(model, version=version, unfinished=unfinished)
        self._held = mode
        self._dialect.weight_version = self._version = version

    def _version_tag(self, weights: str) -> str:
        """Return the weight version that identifies these weights of this process."""
        return f"{self._owner}/{weights}"

    async def _call(self, path: str, body: Json, seconds: float = _CALL_SECONDS) -> None:
        await self._dialect.client.command(path, body, seconds=seconds)
