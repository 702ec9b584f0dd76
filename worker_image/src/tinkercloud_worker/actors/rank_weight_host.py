"""The machine of a trainer's rank 0, from which published full models are sent to engines.

This is the head's side of a `weight_store`: it starts the store on the node of rank 0, stores
models there, and sends them from there. It copies files to or from the head only when necessary.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import structlog
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_worker.actors.rank_group import RankGroup
from tinkercloud_worker.actors.shares import Shares
from tinkercloud_worker.actors.weight_store import (
    PART_BYTES,
    StoredModel,
    WeightStore,
    WeightStoreConfig,
    WeightStoreHandle,
)
from tinkercloud_worker.engine.trainer import Publication
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.weight_host import WeightHostLost
from tinkercloud_worker.inference.weights_folder import SavedWeights

log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 15.0
_ENDED = "the process that stores full models on the node of rank 0 has ended"


class RankWeightHost:
    """See `weight_host.WeightHost`: the machine of a trainer's rank 0.

    Call `attach_to` and `close` on the engine's thread, `store` on any thread, and the other
    methods on the event loop.
    """

    def __init__(self, config: WeightStoreConfig) -> None:
        """Create a host without starting a store.

        Args:
            config: where models are stored.
        """
        self._config = config
        self._store: WeightStoreHandle | None = None
        self._group: RankGroup | None = None
        """The group whose rank 0 is on the node of the store."""

    def attach_to(self, group: RankGroup) -> None:
        """Start a store on the node of a group's rank 0, unless it has one.

        Raises:
            RanksLost: the group is lost.
        """
        if self._group is group:
            return
        self.close()
        location = group.location()
        remote: Any = ray.remote  # whose type knows no node affinity
        actor = remote(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(location.node, soft=False),
        )(WeightStore)
        self._store, self._group = actor.remote(self._config, location.gpus), group

    def store(self, shares: Shares) -> "ModelAtRanks":
        """Write weights to the store.

        Args:
            shares: what the ranks have exported of a full model. They can still be read if this
                fails.

        Raises:
            WeightHostLost: the store has ended.
            Unavailable: the store is full or can't write them, or the weights were lost.
        """
        store = self._current()
        try:
            model: StoredModel = waited(store.write.remote(shares))
        except WeightHostLost:
            if self._store is store:
                # So that `attach_to` starts another store.
                self._group = None
            raise
        return ModelAtRanks(store, model)

    def store_or_copy(self, shares: Shares) -> Publication:
        """Store a model, or copy it to the head if it can't be stored; raises as `Shares`."""
        try:
            return self.store(shares)
        except Unavailable as error:
            log.warning("a published model is copied to the head", reason=error.message)
        return shares.weights()

    def close(self) -> None:
        """End the actor and remove its files."""
        store, self._store, self._group = self._store, None, None
        if store is not None:
            with suppress(RayError):
                ray.get(store.close.remote(), timeout=_CLOSE_SECONDS)
            ray.kill(store)

    @asynccontextmanager
    async def weights_of(self, model: SavedWeights) -> AsyncIterator[Path]:
        """See `WeightHost.weights_of`. Weights that only the head has are copied temporarily.

        If the store is replaced meanwhile, readers fail; this is reported as WeightHostLost,
        whatever error the engine returns.
        """
        store = self._current()
        try:
            async with self._present_at(store, model) as path:
                yield path
        except (InvalidRequest, ServerError) as error:
            if self.is_current(store):
                raise
            raise WeightHostLost(error.message) from error

    @asynccontextmanager
    async def _present_at(
        self, store: WeightStoreHandle, model: SavedWeights
    ) -> AsyncIterator[Path]:
        remote = model.remote
        if isinstance(remote, ModelAtRanks) and remote.store is store:
            yield await _awaited(store.weights_of.remote(model.name))
            return
        await asyncio.to_thread(model.fetch)
        # The model may be sent to several engines at once, each from a separate copy.
        name = f"{model.name}-{uuid4().hex}"
        try:
            try:
                await self._upload(store, model, name)
            except (Unavailable, OSError) as error:
                raise WeightHostLost(
                    f"failed to copy a model to the trainer's ranks: {error}"
                ) from None
            yield await _awaited(store.weights_of.remote(name))
        finally:
            store.remove.remote(name)

    async def _upload(self, store: WeightStoreHandle, model: SavedWeights, name: str) -> None:
        path = model.local_dir / FULL_WEIGHTS
        await _awaited(store.reserve.remote(name, model.size_of(FULL_WEIGHTS)))
        for start in range(0, model.size_of(FULL_WEIGHTS), PART_BYTES):
            part = await asyncio.to_thread(np.fromfile, path, np.uint8, PART_BYTES, "", start)
            await _awaited(store.upload.remote(name, part))

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> "RemoteSender":
        """See `WeightHost.start`."""
        store = self._current()
        name: str = await _awaited(store.start.remote(module, dict(options), purpose))
        return RemoteSender(self, store, name, purpose)

    async def address_towards(self, url: str) -> str:
        """See `WeightHost.address_towards`."""
        address: str = await _awaited(self._current().address_towards.remote(url))
        return address

    def is_current(self, store: WeightStoreHandle) -> bool:
        """Return whether this is the current store."""
        return self._store is store

    def _current(self) -> WeightStoreHandle:
        if self._store is None:
            raise WeightHostLost("the trainer's ranks are not running")
        return self._store


class ModelAtRanks:
    """See `engine.trainer.RemoteModel`."""

    def __init__(self, store: WeightStoreHandle, model: StoredModel) -> None:
        """Create a handle of a model.

        Args:
            store: the store that has written it.
            model: the store's description of it.
        """
        self.store = store
        self._files = model.files
        self.name = model.name
        self.size_bytes = model.files[FULL_WEIGHTS]
        self.tensor_names = model.tensor_names
        self._one_at_a_time = threading.Lock()

    def fetch(self, folder: Path) -> None:
        """See `RemoteModel.fetch`."""
        with self._one_at_a_time:
            if folder.exists():
                return
            arriving = folder.with_name(f"{folder.name}.arriving")
            try:
                arriving.mkdir(parents=True)
                for file, size in self._files.items():
                    self._fetch(file, size, arriving / file)
                arriving.rename(folder)
            except OSError as error:
                raise Unavailable(
                    f"failed to copy weights of {self.size_bytes} bytes to {folder.parent}:"
                    f" {error.strerror or error}; enlarge its volume"
                ) from error
            finally:
                shutil.rmtree(arriving, ignore_errors=True)

    def _fetch(self, file: str, size: int, path: Path) -> None:
        with path.open("wb") as target:
            for start in range(0, size, PART_BYTES):
                try:
                    part = waited(self.store.read.remote(self.name, file, start))
                except WeightHostLost as loss:
                    raise NotFound(f"{loss.message}; save the weights again") from None
                target.write(part.data)

    def remove(self) -> None:
        """See `RemoteModel.remove`."""
        self.store.remove.remote(self.name)


class RemoteSender:
    """A sender process that a store has started; see `weight_host.WeightSender`."""

    def __init__(
        self, host: RankWeightHost, store: WeightStoreHandle, name: str, purpose: str
    ) -> None:
        """Create a handle of a sender.

        Args:
            host: the host where it runs.
            store: the store that has started it.
            name: its name in that store.
            purpose: its purpose, for error messages.
        """
        self._host = host
        self._store = store
        self._name = name
        self._purpose = purpose

    async def has_ended(self) -> bool:
        """See `WeightSender.has_ended`. It ends with its store."""
        if not self._host.is_current(self._store):
            return True
        try:
            answer: bool = await _awaited(self._store.has_ended.remote(self._name))
        except WeightHostLost:
            return True
        return answer

    def send(self, line: Json) -> None:
        """See `WeightSender.send`."""
        self._store.send.remote(self._name, dict(line))

    async def receive(self, seconds: float) -> dict[str, Any]:
        """See `WeightSender.receive`."""
        said: dict[str, Any] = await _awaited(self._store.receive.remote(self._name, seconds))
        return said

    def failure(self, reason: str) -> ServerError:
        """See `WeightSender.failure`."""
        return ServerError(f"{self._purpose} failed: {reason}")

    async def kill(self) -> None:
        """See `WeightSender.kill`."""
        with suppress(WeightHostLost):
            await _awaited(self._store.kill.remote(self._name))


def waited(answer: Any) -> Any:  # noqa: ANN401 - Ray's references, and their values, are of any type
    """Wait for the result of a weight store.

    Raises:
        WeightHostLost: the weight store has ended.
        WireError: the error that the weight store raised.
    """
    try:
        return ray.get(answer)
    except RayError as error:
        raise _cause(error, WeightHostLost(_ENDED)) from error


async def _awaited(answer: Any) -> Any:  # noqa: ANN401 - as above
    """Wait for the result of a store.

    Raises:
        WeightHostLost: the store has ended.
        WireError, OSError: the error that it raised.
    """
    try:
        return await answer
    except RayError as error:
        raise _cause(error, WeightHostLost(_ENDED)) from error


def _cause(error: RayError, lost: WireError) -> Exception:
    """Return the error that a store raised, or `lost` if Ray itself failed."""
    if not isinstance(error, RayTaskError):
        return lost
    cause = error.cause
    if isinstance(cause, RayError):
        return lost
    return cause if isinstance(cause, WireError | OSError) else error
