"""Passes full models through shared memory to an SGLang engine on the same machine.

A separate process (`shared_memory_sender`) copies a model to shared memory, part by part, and the
engine gets handles. The process ends with the transfer, which frees the memory: no GPU memory is
used between two models, and none leaks if an engine dies while reading.
"""

from pathlib import Path

from tinkercloud_worker import metrics
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.weight_host import WeightHost, WeightSender
from tinkercloud_worker.inference.weights_folder import SavedWeights

_PARTS = "tinkercloud_worker.inference.sglang.shared_memory_sender"
_START_SECONDS = 120.0
"""Time for the process to import torch, and share the first part."""
_STEP_SECONDS = 60.0
"""Time for one part to be shared, or to be loaded."""


class SglangSharedMemory:
    """Shared memory transfer to one engine. Belongs to one event loop."""

    way: metrics.Way = "shared_memory"

    def __init__(
        self, client: InferenceClient, memory: accelerator.Memory, host: WeightHost
    ) -> None:
        """Create a transfer without sharing memory.

        Args:
            client: client of the engine.
            memory: `cuda` is shared as torch shares CUDA tensors (CUDA IPC), `cpu` as it shares
                others, by files in /dev/shm.
            host: the machine whose memory is shared.
        """
        self._client = client
        self._memory = memory
        self._host = host
        self._ranks = 0
        self._process: WeightSender | None = None

    async def join(self, ranks: int) -> None:
        """Set the number of ranks of the engine; each gets its own handles."""
        self._ranks = ranks

    async def send(self, model: SavedWeights, most_bytes: int) -> None:
        """Transfer all tensors of a full model, during an update of the engine.

        Args:
            model: the model.
            most_bytes: maximum size of a part, unless a single tensor is larger. Two parts are in
                memory at once.

        Raises:
            InvalidRequest: the engine rejects the transfer.
            ServerError: the engine or the sender process failed.
            ServerUnreachable: the engine is unreachable; it crashes if it can't open a handle.
        """
        try:
            async with self._host.weights_of(model) as file:
                self._process = process = await self._start(file, most_bytes)
                await self._transfer(process)
        finally:
            await self.leave()

    async def _transfer(self, process: WeightSender) -> None:
        message = await process.receive(_START_SECONDS)
        while "handles" in message:
            body = {
                "serialized_named_tensors": message["handles"],
                "load_format": "flattened_bucket",
                "flush_cache": True,
            }
            await self._client.post("/update_weights_from_tensor", body, seconds=_STEP_SECONDS)
            process.send({"loaded": True})
            message = await process.receive(_STEP_SECONDS)

    async def leave(self) -> None:
        """End the sender process, which frees the memory."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def close(self) -> None:
        """End the sender process; the engine references none of its memory."""
        await self.leave()

    async def _start(self, file: Path, most_bytes: int) -> WeightSender:
        options = {
            "--file": str(file),
            "--most-bytes": str(most_bytes),
            "--memory": self._memory,
            "--ranks": str(self._ranks),
        }
        return await self._host.start(_PARTS, options, f"sharing memory with {self._client.url}")
