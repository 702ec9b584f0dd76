"""Whole models that stay beside a trainer's first rank: the actor that stores them.

A weight store is an actor on the node of rank 0. It takes what that rank has put into the node's
object store, writes it in the form that engines read, and starts the processes that send it to them
(`inference.sender_process`): over a process group, from the rank's GPU where it has one, or in
memory that engines on the same machine share. Nothing of it passes through the head, which fetches
the files when it must (`rank_weight_host`): for an engine that takes them by no other method, or
for another head.

A store lives as long as its group of ranks, and its models are removed with it.
"""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from ray.actor import ActorHandle

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import NotFound, Unavailable
from tinkercloud_worker import logs
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json
from tinkercloud_worker.inference.sender_process import SenderProcess
from tinkercloud_worker.inference.weights_folder import WeightsFolder, tensor_names

PART_BYTES = 64 << 20
"""Of a file, transferred at a time."""


@dataclass(frozen=True, slots=True)
class WeightStoreConfig:
    """Where models are stored, on the machine of the first rank."""

    folder: Path
    """Written to by this actor only."""
    max_bytes: int
    """Of the models."""
    base_path: Path
    """Hugging Face folder of the base model, there."""
    base_model: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A whole model that a store has written."""

    name: str
    files: Mapping[str, int]
    """Sizes, in bytes."""
    tensor_names: Sequence[str]


class WeightStore:
    """The actor."""

    def __init__(self, config: WeightStoreConfig, gpus: Mapping[str, str]) -> None:
        """Make an empty store.

        Args:
            config: where to store models.
            gpus: environment that gives processes the rank's GPUs.
        """
        logs.configure()
        # An earlier store may have left files.
        shutil.rmtree(config.folder, ignore_errors=True)
        self._config = config
        self._folder = config.folder
        self._gpus = gpus
        self._stored_bytes: dict[str, int] = {}
        # Names are unique over all stores: a head asks for a model by its name alone.
        self._files = WeightsFolder(
            self._folder, server_dir=None, owner=f"ranks-{uuid4().hex}", base_path=config.base_path
        )
        self._senders: dict[str, SenderProcess] = {}

    async def write(self, weights: WeightsSnapshot) -> StoredModel:
        """Write all weights of a model.

        Raises:
            Unavailable: with them it would be too much, or they can't be written.
        """
        being_written = uuid4().hex
        await self.reserve(being_written, weights.size_bytes)
        try:
            model = await asyncio.to_thread(self._write, weights)
            self._stored_bytes[model.name] = weights.size_bytes
        finally:
            del self._stored_bytes[being_written]
        return model

    def _write(self, weights: WeightsSnapshot) -> StoredModel:
        name = self._files.write(weights, self._config.base_model)
        folder = self._files.find(name).local_dir
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        return StoredModel(name, sizes, tensor_names(folder / FULL_WEIGHTS))

    async def weights_of(self, name: str) -> Path:
        """Return the weights file of a model that was written, or uploaded, under a name."""
        return self._folder / name / FULL_WEIGHTS

    async def read(self, name: str, file: str, start: int) -> npt.NDArray[np.uint8]:
        """Return a part of a file.

        Raises:
            NotFound: somebody has removed it.
        """
        path = self._folder / name / file
        try:
            return await asyncio.to_thread(np.fromfile, path, np.uint8, PART_BYTES, "", start)
        except FileNotFoundError:
            raise NotFound(f"{path.parent} is gone: save the weights again") from None

    async def reserve(self, name: str, size: int) -> None:
        """Reserve room for weights that are to be uploaded under a name, until they are removed.

        Args:
            name: used for these weights only.
            size: in bytes.

        Raises:
            Unavailable: with them it would be too much.
        """
        stored = sum(self._stored_bytes.values())
        if stored + size > self._config.max_bytes:
            raise Unavailable(
                f"{size} bytes beside {stored} are more than limits.max_placed_bytes,"
                f" {self._config.max_bytes}"
            )
        self._stored_bytes[name] = size

    async def upload(self, name: str, part: npt.NDArray[np.uint8]) -> None:
        """Append a part to weights for which room is reserved."""
        await asyncio.to_thread(self._append, self._folder / name / FULL_WEIGHTS, part)

    def _append(self, path: Path, part: npt.NDArray[np.uint8]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(part.data)

    async def remove(self, name: str) -> None:
        """Remove the model that was written, or uploaded, under a name."""
        self._stored_bytes.pop(name, None)
        await asyncio.to_thread(self._files.remove, name)

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> str:
        """Start a sender; return its name in this store."""
        sender = await SenderProcess.start(module, options, purpose, self._gpus)
        name = uuid4().hex
        self._senders[name] = sender
        return name

    async def has_ended(self, sender: str) -> bool:
        """See `WeightSender.has_ended`."""
        return await self._senders[sender].has_ended()

    async def send(self, sender: str, line: Json) -> None:
        """See `WeightSender.send`."""
        self._senders[sender].send(line)

    async def receive(self, sender: str, seconds: float) -> dict[str, Any]:
        """See `WeightSender.receive`."""
        return await self._senders[sender].receive(seconds)

    async def kill(self, sender: str) -> None:
        """See `WeightSender.kill`."""
        if (ending := self._senders.pop(sender, None)) is not None:
            await ending.kill()

    async def address_towards(self, url: str) -> str:
        """See `WeightHost.address_towards`."""
        return await sender_process.address_towards(url)

    async def close(self) -> None:
        """Kill all senders and remove all files."""
        await asyncio.gather(*[self.kill(sender) for sender in list(self._senders)])
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


WeightStoreHandle = ActorHandle[WeightStore]
