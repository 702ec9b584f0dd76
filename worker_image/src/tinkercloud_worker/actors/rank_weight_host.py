"""The machine of a trainer's first rank, from which published whole models are sent to engines.

This is the head's side of a `weight_store`: it starts the store beside rank 0 and has models
written there and sent from there. It copies files either way only when it must.
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
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_worker.actors.group import RankGroup
from tinkercloud_worker.actors.weight_store import (
    PART_BYTES,
    StoredModel,
    WeightStore,
    WeightStoreConfig,
    WeightStoreHandle,
)
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.weight_host import WeightHostLost
from tinkercloud_worker.inference.weights_folder import SavedWeights

_CLOSE_SECONDS = 15.0
_ENDED = "the process that keeps whole models beside the trainer's ranks has ended"


class RankWeightHost:
    """See `weight_host.WeightHost`: the machine of a trainer's first rank.

    `attach_to` and `close` belong to the engine's thread, `store` to any, the rest to the event
    loop.
    """

    def __init__(self, config: WeightStoreConfig) -> None:
        """Make a host; no store is started yet.

        Args:
            config: where models are stored there.
        """
        self._config = config
        self._store: WeightStoreHandle | None = None
        self._group: RankGroup | None = None
        """The group beside whose first rank the store is."""

    def attach_to(self, group: RankGroup) -> None:
        """Start a store beside the first rank of a group; nothing is done if there is one.

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

    def store(self, weights: Any) -> "ModelAtRanks":  # noqa: ANN401 - Ray's references are of any type
        """Have the store write weights.

        Args:
            weights: a reference to the WeightsSnapshot of a whole model.

        Raises:
            WeightHostLost: the store is gone.
            Unavailable: it holds too much already, or can't write them; or they are lost.
        """
        store = self._current()
        try:
            model: StoredModel = waited(store.write.remote(weights))
        except WeightHostLost:
            if self._store is store:
                # `attach_to` then starts another.
                self._group = None
            raise
        return ModelAtRanks(store, model)

    def close(self) -> None:
        """End the actor and remove its files."""
        store, self._store, self._group = self._store, None, None
        if store is not None:
            with suppress(RayError):
                ray.get(store.close.remote(), timeout=_CLOSE_SECONDS)
            ray.kill(store)

    @asynccontextmanager
    async def weights_of(self, model: SavedWeights) -> AsyncIterator[Path]:
        """See `WeightHost.weights_of`. Weights that only the head has are copied for that long.

        Whatever reads them fails when the store is replaced meanwhile; that is WeightHostLost,
        whatever error the engine reports.
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
        # Several engines may be sent the model at once, each from a copy of its own.
        name = f"{model.name}-{uuid4().hex}"
        try:
            try:
                await self._upload(store, model, name)
            except (Unavailable, OSError) as error:
                raise WeightHostLost(
                    f"a model can't be brought to the trainer's ranks: {error}"
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
        """Return whether this is the store that is there now."""
        return self._store is store

    def _current(self) -> WeightStoreHandle:
        if self._store is None:
            raise WeightHostLost("the trainer's ranks are not there")
        return self._store


class ModelAtRanks:
    """See `engine.trainer.RemoteModel`."""

    def __init__(self, store: WeightStoreHandle, model: StoredModel) -> None:
        """Make a handle of a model.

        Args:
            store: that has written it.
            model: as the store described it.
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
                    f"the {self.size_bytes} bytes of these weights can't be brought to"
                    f" {folder.parent}: {error.strerror or error}; have its volume made larger"
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
    """A sender that a store has started; see `weight_host.WeightSender`."""

    def __init__(
        self, host: RankWeightHost, store: WeightStoreHandle, name: str, purpose: str
    ) -> None:
        """Make a handle of a sender.

        Args:
            host: where it runs.
            store: that has started it.
            name: of it in that store.
            purpose: of it, for the messages of errors.
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
    """Return what a store answers, or the object of a rank that stays in Ray's store.

    Raises:
        WeightHostLost: the weight store has gone.
        Unavailable: the object has.
        WireError: what the weight store raised.
    """
    try:
        return ray.get(answer)
    except RayActorError as error:
        raise WeightHostLost(_ENDED) from error
    except RayError as error:
        lost = Unavailable("the ranks were lost before the weights were safe; save them again")
        raise _cause(error, lost) from error


async def _awaited(answer: Any) -> Any:  # noqa: ANN401 - as above
    """Return what a store answers.

    Raises:
        WeightHostLost: it has gone.
        WireError, OSError: what it raised.
    """
    try:
        return await answer
    except RayError as error:
        raise _cause(error, WeightHostLost(_ENDED)) from error


def _cause(error: RayError, lost: WireError) -> Exception:
    """Return what a store raised, or that something is lost if Ray raised it."""
    if not isinstance(error, RayTaskError):
        return lost
    cause = error.cause
    if isinstance(cause, RayError):
        return lost
    return cause if isinstance(cause, WireError | OSError) else error
