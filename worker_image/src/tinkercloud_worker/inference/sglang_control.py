"""What a head may do with SGLang engines of its own: their memory, and their base weights.

Engines that share GPUs with the trainer are started with `--enable-memory-saver` and
`--enable-weights-cpu-backup`: without the second, weights are not there any more when memory is
taken back.
"""

from tinkercloud_worker.inference.adapters import AdapterFolder
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.sglang import SglangDialect
from tinkercloud_worker.inference.turns import Turns

BASE = "base"
"""Kind of work with the base model's own weights, and adapters on top of them."""
TRAINING = "training"
"""Kind of work of a trainer that shares the engine's GPUs."""

_WEIGHTS, _CACHE, _GRAPHS = "weights", "kv_cache", "cuda_graph"
_MEMORY_SECONDS = 120.0
_WEIGHTS_SECONDS = 1800.0


class SglangControl:
    """One engine. Kinds of work other than BASE and TRAINING are names of whole models."""

    def __init__(self, dialect: SglangDialect, folder: AdapterFolder) -> None:
        self._dialect = dialect
        self._folder = folder
        self._held: str | None = BASE
        """Weights the engine has; None if that is not certain."""
        self.turns = Turns(self._change, BASE)

    def restarted(self) -> None:
        """Take note that the engine has begun again, with what it was started with."""
        self._held = BASE
        self._dialect.weight_version = None
        self.turns.reset(BASE)

    def lost(self) -> None:
        """Take note that the engine has other weights than it should have."""
        self._held = None
        self.turns.reset(None)

    async def _change(self, previous: str | None, kind: str) -> None:
        if kind == TRAINING:
            # Requests that somebody gave up may still run, and an engine that releases its memory
            # while anything runs dies of it. Pausing ends them.
            await self._call("/pause_generation", {"mode": "abort"})
            await self._call("/release_memory_occupation", {"tags": [_CACHE, _WEIGHTS, _GRAPHS]})
            return
        if previous == TRAINING:
            await self._call("/resume_memory_occupation", {"tags": [_WEIGHTS]})
            await self._call("/resume_memory_occupation", {"tags": [_CACHE, _GRAPHS]})
            await self._call("/continue_generation", {})
        if kind != self._held:
            await self._load(kind)

    async def _call(self, path: str, body: Json) -> None:
        await self._dialect.client.post(path, body, seconds=_MEMORY_SECONDS)

    async def _load(self, kind: str) -> None:
        self._held = None
        base = kind == BASE
        folder = await self._dialect.model_path() if base else str(self._folder.there(kind))
        # Keys and values of a prompt belong to the weights they were computed with.
        body = {"model_path": folder, "weight_version": kind, "flush_cache": True}
        answer = await self._dialect.client.post(
            "/update_weights_from_disk", body, seconds=_WEIGHTS_SECONDS
        )
        if not answer.get("success"):
            raise ServerError(
                f"{self._dialect.client.url} could not load {folder}: {answer.get('message')}"
            )
        self._held = kind
        self._dialect.weight_version = kind
