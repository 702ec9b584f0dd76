"""Passes whole models through shared memory to an SGLang engine on the same machine.

A process of its own (`shared_memory_sender`) copies a model there, part by part, and the engine is
given handles. The process ends with the transfer, and its memory is freed: no GPU memory is held
between two models, and none leaks if an engine dies while it reads.
"""

from pathlib import Path

from tinkercloud_worker import metrics
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.weight_host import WeightHost, WeightSender
from tinkercloud_worker.inference.weights_folder import SavedWeights

_PARTS = "tinkercloud_worker.inference.sglang.shared_memory_sender"
_START_SECONDS = 120.0
"""For the process to import torch, and share the first part."""
_STEP_SECONDS = 60.0
"""For one part to be shared, or to be loaded."""


class SglangSharedMemory:
    """Memory shared with one engine. Belongs to one event loop."""

    way: metrics.Way = "shared_memory"

    def __init__(
        self, client: InferenceClient, memory: accelerator.Memory, host: WeightHost
    ) -> None:
        """Make a transfer; no memory is shared yet.

        Args:
            client: of the engine.
            memory: `cuda` is shared as torch shares CUDA tensors (CUDA IPC), `cpu` as it shares
                others, by files in /dev/shm.
            host: whose memory it is.
        """
        self._client = client
        self._memory = memory
        self._host = host
        self._ranks = 0
        self._process: WeightSender | None = None

    async def join(self, ranks: int) -> None:
        """Record how many ranks the engine has; each is given handles of its own."""
        self._ranks = ranks

    async def send(self, model: SavedWeights, most_bytes: int) -> None:
        """Let the engine load all tensors of a whole model, while it is in an update.

        Args:
            model: to load.
            most_bytes: of one part, unless one tensor alone is larger. Two are there at once.

        Raises:
            InvalidRequest: the engine refuses.
            ServerError: it failed, or our process did.
            ServerUnreachable: it is not there; it ends if it can't open what it is given.
        """
        try:
            async with self._host.weights_of(model) as file:
                self._process = process = await self._start(file, most_bytes)
                await self._hand_over(process)
        finally:
            await self.leave()

    async def _hand_over(self, process: WeightSender) -> None:
        said = await process.receive(_START_SECONDS)
        while "handles" in said:
            body = {
                "serialized_named_tensors": said["handles"],
                "load_format": "flattened_bucket",
                "flush_cache": True,
            }
            await self._client.post("/update_weights_from_tensor", body, seconds=_STEP_SECONDS)
            process.send({"loaded": True})
            said = await process.receive(_STEP_SECONDS)

    async def leave(self) -> None:
        """End the process, which frees the memory."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def close(self) -> None:
        """Disconnect from the engine, which holds nothing of ours."""
        await self.leave()

    async def _start(self, file: Path, most_bytes: int) -> WeightSender:
        options = {
            "--file": str(file),
            "--most-bytes": str(most_bytes),
            "--memory": self._memory,
            "--ranks": str(self._ranks),
        }
        return await self._host.start(_PARTS, options, f"sharing memory with {self._client.url}")
