"""What a head may do with SGLang engines of its own: their memory, and their base weights.

Engines that share GPUs with the trainer are started with `--enable-memory-saver` and
`--enable-weights-cpu-backup`: without the second, weights are not there any more when memory is
taken back.

An engine's weights are marked by who loaded them and what they are. Every answer tells the mark, so
that one from other weights is never taken for right, and an engine that has begun again is known by
having none of ours. The mark also says whether it has given its memory away, so that a head which
comes after another asks for it back, and never twice for the same.
"""

from pathlib import Path

from tinkercloud_worker import metrics
from tinkercloud_worker.inference.client import Json
from tinkercloud_worker.inference.server_modes import ModeSwitch
from tinkercloud_worker.inference.sglang.dialect import RELEASED, SglangDialect
from tinkercloud_worker.inference.sglang.weights import DirectTransfer, SglangWeights
from tinkercloud_worker.inference.weights_folder import WeightsFolder

BASE = "base"
"""Mode with the base model's own weights, and adapters on top of them."""
TRAINING = "training"
"""Mode in which a trainer that shares the engine's GPUs has their memory."""

_UNMARKED = "default"
"""What SGLang calls the weights it was started with."""
_UNFINISHED = "unfinished"
"""Stands for the weights of an engine while it is being sent others."""
_WEIGHTS, _CACHE, _GRAPHS = "weights", "kv_cache", "cuda_graph"
_CALL_SECONDS = 120.0
_MEMORY_SECONDS = 900.0
"""For an engine to copy its weights out of a GPU's memory, at first to pages that it has to pin."""


class SglangControl:
    """One engine. Its modes are BASE, TRAINING and the names of whole models."""

    def __init__(
        self,
        dialect: SglangDialect,
        folder: WeightsFolder,
        *,
        owner: str,
        base_path: str,
        direct: DirectTransfer | None,
    ) -> None:
        """Make a control; the engine is not asked yet.

        Args:
            dialect: of the engine.
            folder: where whole models are.
            owner: differs between any two processes that ever control the engine.
            base_path: the base model's folder, should the engine no more know its own.
            direct: transfers whole models to the engine; None for requests and files alone.
        """
        self._dialect = dialect
        self._weights = SglangWeights(dialect.client, direct)
        self._folder = folder
        self._owner = owner
        self._base_path = base_path
        self._held: str | None = None
        """Mode whose weights it has; None for somebody else's."""
        self._is_released: bool | None = False
        """None if it was told to give its memory away or to take it back, and has not answered."""
        self._version = _UNMARKED
        """Its mark while it has its memory."""
        self._has_met = False
        metrics.ENGINE_RESTARTS.labels(dialect.client.url)
        self.modes = ModeSwitch(self._switch, None)

    def lost(self) -> None:
        """Take note that the engine may have begun again, or has other weights than it should."""
        self.modes.reset(None)

    def look_again(self) -> None:
        """See, before work that waits begins, whether the engine has begun again meanwhile."""
        if self.modes.is_idle:
            self.modes.reset(None)

    async def close(self) -> None:
        """Let go of the engine."""
        await self._weights.close()

    async def _switch(self, mode: str) -> None:
        # It may have begun again since it was last asked.
        await self._find_out()
        if mode == TRAINING:
            await self._release()
            return
        await self._resume()
        if mode != self._held:
            await self._load(mode)

    async def _find_out(self) -> None:
        info = await self._dialect.model_info()
        marked = str(info["weight_version"])
        self._version = marked.removesuffix(RELEASED)
        is_marked = marked != self._version
        self._is_released = (self._is_released or None) if is_marked else False
        owner, _, held = self._version.rpartition("/")
        if marked == _UNMARKED:
            if self._has_met:
                metrics.ENGINE_RESTARTS.labels(self._dialect.client.url).inc()
            await self._weights.forget()
            self._base_path = str(info["model_path"])
            self._held = BASE
            self._version = self._version_tag(BASE)
            await self._weights.set_version(self._version)
        else:
            self._held = held if owner == self._owner else None
        self._dialect.weight_version = self._version_tag(self._held) if self._held else None
        self._has_met = True

    async def _release(self) -> None:
        if self._is_released:
            return
        # One that is marked, by a head that was killed, may have its memory all the same.
        await self._resume()
        # First of all: a head that finds the mark on an engine which has its memory makes it begin
        # again, and so does one that finds none on an engine without.
        await self._weights.set_version(self._version + RELEASED)
        self._is_released = None
        # Requests that somebody gave up may still run, and an engine that releases its memory while
        # anything runs dies of it. Pausing ends them.
        await self._call("/pause_generation", {"mode": "abort"})
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
        # The mark goes last: without it, an engine that is paused is taken for one that is ill.
        await self._call("/continue_generation", {})
        await self._weights.set_version(self._version)
        self._is_released = False

    async def _load(self, mode: str) -> None:
        version = self._version_tag(mode)
        if mode == BASE:
            self._held = None
            await self._weights.load_folder(Path(self._base_path), version=version)
        else:
            model = self._folder.find(mode)
            await self._weights.check_experts(model)
            self._held = None
            await self._weights.load(
                model, version=version, unfinished=self._version_tag(_UNFINISHED)
            )
        self._held = mode
        self._dialect.weight_version = self._version = version

    def _version_tag(self, weights: str) -> str:
        """Return the weight version that says whose weights they are, and which."""
        return f"{self._owner}/{weights}"

    async def _call(self, path: str, body: Json, seconds: float = _CALL_SECONDS) -> None:
        await self._dialect.client.command(path, body, seconds=seconds)
