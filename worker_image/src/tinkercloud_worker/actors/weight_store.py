"""The actor that stores published full models on the node of rank 0.

It assembles the weights that the ranks have put in the stores of their nodes, writes them in the
format that engines read, and starts the processes that send them (`inference.sender_process`) over
a process group, from the GPU of rank 0 if it has one. The weights do not pass through the head,
which fetches the files only when necessary (`rank_weight_host`): for an engine that supports no
other method, or for another head.

A store exists as long as its group of ranks, and its models are removed with it.
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

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_worker import logs
from tinkercloud_worker.actors.shares import Shares
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json
from tinkercloud_worker.inference.sender_process import SenderProcess
from tinkercloud_worker.inference.weights_folder import WeightsFolder, tensor_names

PART_BYTES = 64 << 20
"""Bytes of a file that are transferred at a time."""


@dataclass(frozen=True, slots=True)
class WeightStoreConfig:
    """Where models are stored, on the machine of rank 0."""

    folder: Path
    """Folder that only this actor writes to."""
    max_bytes: int
    """Maximum total size of models."""
    base_path: Path
    """Hugging Face folder of the base model on that machine."""
    base_model: str
    """Name of the base model."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A full model that a store has written."""

    name: str
    files: Mapping[str, int]
    """File sizes by name, in bytes."""
    tensor_names: Sequence[str]


class WeightStore:
    """The actor; see the module docstring."""

    def __init__(self, config: WeightStoreConfig, gpus: Mapping[str, str]) -> None:
        """Create an empty store.

        Args:
            config: where to store models.
            gpus: environment that gives processes the GPUs of rank 0.
        """
        logs.configure()
        # An earlier store may have left files.
        shutil.rmtree(config.folder, ignore_errors=True)
        self._config = config
        self._folder = config.folder
        self._gpus = gpus
        self._stored_bytes: dict[str, int] = {}
        self._assembling = asyncio.Lock()
        """Held by the one write that has a model in memory."""
        # Names are unique across stores: a head identifies a model by its name alone.
        self._files = WeightsFolder(
            self._folder,
            server_dir=None,
            owner=f"ranks-{uuid4().hex}",
            base_path=config.base_path,
            base_model=config.base_model,
        )
        self._senders: dict[str, SenderProcess] = {}

    async def write(self, shares: Shares) -> StoredModel:
        """Write all weights of a model. One model at a time is in memory; other writes wait.

        Raises:
            Unavailable: the size limit would be exceeded, the files can't be written, or a part of
                the weights was lost.
        """
        being_written = uuid4().hex
        await self.reserve(being_written, shares.size_bytes)
        try:
            async with self._assembling:
                model = await asyncio.to_thread(self._write, shares)
            self._stored_bytes[model.name] = shares.size_bytes
        finally:
            del self._stored_bytes[being_written]
        return model

    def _write(self, shares: Shares) -> StoredModel:
        name = self._files.write(shares.weights())
        folder = self._files.find(name).local_dir
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        return StoredModel(name, sizes, tensor_names(folder / FULL_WEIGHTS))

    async def weights_of(self, name: str) -> Path:
        """Return the weights file of the model with this name."""
        return self._folder / name / FULL_WEIGHTS

    async def read(self, name: str, file: str, start: int) -> npt.NDArray[np.uint8]:
        """Return a part of a file.

        Raises:
            NotFound: the file was removed.
        """
        path = self._folder / name / file
        try:
            return await asyncio.to_thread(np.fromfile, path, np.uint8, PART_BYTES, "", start)
        except FileNotFoundError:
            raise NotFound(f"{path.parent} no longer exists; save the weights again") from None

    async def reserve(self, name: str, size: int) -> None:
        """Reserve space for an upload, until its weights are removed.

        Args:
            name: unique name of the weights.
            size: size in bytes.

        Raises:
            Unavailable: the size limit would be exceeded.
        """
        stored = sum(self._stored_bytes.values())
        if stored + size > self._config.max_bytes:
            raise Unavailable(
                f"storing {size} bytes in addition to {stored} would exceed"
                f" limits.max_placed_bytes ({self._config.max_bytes}); raise this limit, or"
                " save the weights less often"
            )
        self._stored_bytes[name] = size

    async def upload(self, name: str, part: npt.NDArray[np.uint8]) -> None:
        """Append a part to weights for which space is reserved."""
        await asyncio.to_thread(self._append, self._folder / name / FULL_WEIGHTS, part)

    def _append(self, path: Path, part: npt.NDArray[np.uint8]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(part.data)

    async def remove(self, name: str) -> None:
        """Remove the model with this name."""
        self._stored_bytes.pop(name, None)
        await asyncio.to_thread(self._files.remove, name)

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> str:
        """Start a sender process; return its name in this store."""
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
