"""Whole models that stay where a trainer's first rank is, and go to engines from there.

A porter is an actor on the node of rank 0. It takes what that rank has put into the node's store,
writes it as engines read it, and starts the processes beside it that bring it to them
(`inference.sender_process`): over a process group, from the rank's GPU where it has one, or in
memory that engines on the same machine share. Nothing of it passes through the head, which fetches
the files when it must: for an engine that takes them no other way, or for another head.

A porter lives as long as its group of ranks, and what it keeps goes with it.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_protocol.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_worker import logs
from tinkercloud_worker.actors.group import RankGroup
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.place import PlaceLost
from tinkercloud_worker.inference.sender_process import CourierProcess
from tinkercloud_worker.inference.weights_folder import SavedWeights, WeightsFolder, tensor_names

_PART_BYTES = 64 << 20
"""Of a file, at a time on its way."""
_CLOSE_SECONDS = 15.0
_ENDED = "the process that keeps whole models beside the trainer's ranks has ended"


@dataclass(frozen=True, slots=True)
class Berth:
    """Where models are kept, on the machine of the first rank."""

    folder: Path
    """That nobody else writes to."""
    max_bytes: int
    """Of the models."""
    base_path: Path
    """Hugging Face folder of the base model, there."""
    base_model: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a porter has written."""

    name: str
    files: Mapping[str, int]
    """Sizes, in bytes."""
    tensor_names: Sequence[str]


class Porter:
    """The actor."""

    def __init__(self, berth: Berth, gpus: Mapping[str, str]) -> None:
        """Begin with nothing.

        Args:
            berth: where to keep models.
            gpus: variables by which processes have the rank's GPUs.
        """
        logs.configure()
        # One before it may have left something.
        shutil.rmtree(berth.folder, ignore_errors=True)
        self._berth = berth
        self._folder = berth.folder
        self._gpus = gpus
        self._kept_bytes: dict[str, int] = {}
        # No other has ever had the name of what lies here: a head asks for it by that alone.
        self._files = WeightsFolder(
            self._folder, server_dir=None, owner=f"ranks-{uuid4().hex}", base_path=berth.base_path
        )
        self._couriers: dict[str, CourierProcess] = {}

    async def write(self, weights: WeightsSnapshot) -> Contents:
        """Write all weights of a model.

        Raises:
            Unavailable: with them it would be too much, or they can't be written.
        """
        being_written = uuid4().hex
        await self.reserve(being_written, weights.size_bytes)
        try:
            contents = await asyncio.to_thread(self._write, weights)
            self._kept_bytes[contents.name] = weights.size_bytes
        finally:
            del self._kept_bytes[being_written]
        return contents

    def _write(self, weights: WeightsSnapshot) -> Contents:
        name = self._files.write(weights, self._berth.base_model)
        folder = self._files.find(name).local_dir
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        return Contents(name, sizes, tensor_names(folder / FULL_WEIGHTS))

    async def weights_of(self, name: str) -> Path:
        """Return where lie the weights of what was written, or uploaded, under a name."""
        return self._folder / name / FULL_WEIGHTS

    async def read(self, name: str, file: str, start: int) -> npt.NDArray[np.uint8]:
        """Return a part of a file.

        Raises:
            NotFound: somebody has removed it.
        """
        path = self._folder / name / file
        try:
            return await asyncio.to_thread(np.fromfile, path, np.uint8, _PART_BYTES, "", start)
        except FileNotFoundError:
            raise NotFound(f"{path.parent} is gone: save the weights again") from None

    async def reserve(self, name: str, size: int) -> None:
        """Have room for weights that are to be uploaded under a name, until they are removed.

        Args:
            name: of theirs alone.
            size: in bytes.

        Raises:
            Unavailable: with them it would be too much.
        """
        kept = sum(self._kept_bytes.values())
        if kept + size > self._berth.max_bytes:
            raise Unavailable(
                f"{size} bytes beside {kept} are more than limits.max_placed_bytes,"
                f" {self._berth.max_bytes}"
            )
        self._kept_bytes[name] = size

    async def upload(self, name: str, part: npt.NDArray[np.uint8]) -> None:
        """Add to weights for which there is room, and which lie at the head."""
        await asyncio.to_thread(self._append, self._folder / name / FULL_WEIGHTS, part)

    def _append(self, path: Path, part: npt.NDArray[np.uint8]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(part.data)

    async def remove(self, name: str) -> None:
        """Remove what was written, or uploaded, under a name."""
        self._kept_bytes.pop(name, None)
        await asyncio.to_thread(self._files.remove, name)

    async def start(self, module: str, options: Mapping[str, str], errand: str) -> str:
        """Start a courier; return the name by which it is known here."""
        courier = await CourierProcess.start(module, options, errand, self._gpus)
        name = uuid4().hex
        self._couriers[name] = courier
        return name

    async def has_ended(self, courier: str) -> bool:
        """See `Courier.has_ended`."""
        return await self._couriers[courier].has_ended()

    async def tell(self, courier: str, line: Json) -> None:
        """See `Courier.tell`."""
        self._couriers[courier].tell(line)

    async def heard(self, courier: str, seconds: float) -> dict[str, Any]:
        """See `Courier.heard`."""
        return await self._couriers[courier].heard(seconds)

    async def end(self, courier: str) -> None:
        """See `Courier.end`."""
        if (ending := self._couriers.pop(courier, None)) is not None:
            await ending.end()

    async def address_towards(self, url: str) -> str:
        """See `Place.address_towards`."""
        return await sender_process.address_towards(url)

    async def close(self) -> None:
        """Remove all that was written, and end all couriers."""
        await asyncio.gather(*[self.end(courier) for courier in list(self._couriers)])
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


PorterHandle = ActorHandle[Porter]


class RanksPlace:
    """See `place.Place`: the machine of a trainer's first rank.

    `settle` and `close` belong to the engine's thread, `keep` to any, the rest to the event loop.
    """

    def __init__(self, berth: Berth) -> None:
        """Make a place, at which nobody is yet.

        Args:
            berth: where models are kept there.
        """
        self._berth = berth
        self._porter: PorterHandle | None = None
        self._group: RankGroup | None = None
        """Beside whose first rank it is."""

    def settle(self, group: RankGroup) -> None:
        """Have a porter beside the first rank of a group; nothing is done if there is one.

        Raises:
            RanksLost: the group is lost.
        """
        if self._group is group:
            return
        self.close()
        where = group.surroundings()
        remote: Any = ray.remote  # whose type knows no node affinity
        actor = remote(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(where.node, soft=False),
        )(Porter)
        self._porter, self._group = actor.remote(self._berth, where.gpus), group

    def keep(self, weights: Any) -> "ModelAtRanks":  # noqa: ANN401 - Ray's references are of any type
        """Have weights written there.

        Args:
            weights: a reference to the WeightsSnapshot of a whole model.

        Raises:
            PlaceLost: the porter is gone.
            Unavailable: it keeps too much already, or can't write them; or they are lost.
        """
        porter = self._current()
        try:
            contents: Contents = waited(porter.write.remote(weights))
        except PlaceLost:
            if self._porter is porter:
                # So that another one settles.
                self._group = None
            raise
        return ModelAtRanks(porter, contents)

    def close(self) -> None:
        """Have nobody there, and nothing left."""
        porter, self._porter, self._group = self._porter, None, None
        if porter is not None:
            with suppress(RayError):
                ray.get(porter.close.remote(), timeout=_CLOSE_SECONDS)
            ray.kill(porter)

    @asynccontextmanager
    async def weights_of(self, model: SavedWeights) -> AsyncIterator[Path]:
        """See `Place.weights_of`. What lies at the head only is brought for that long.

        Who takes them from there fails when the porter is replaced meanwhile; that is PlaceLost,
        whatever the engine makes of it.
        """
        porter = self._current()
        try:
            async with self._lying_with(porter, model) as path:
                yield path
        except (InvalidRequest, ServerError) as error:
            if self.is_with(porter):
                raise
            raise PlaceLost(error.message) from error

    @asynccontextmanager
    async def _lying_with(self, porter: PorterHandle, model: SavedWeights) -> AsyncIterator[Path]:
        placed = model.remote
        if isinstance(placed, ModelAtRanks) and placed.porter is porter:
            yield await _awaited(porter.weights_of.remote(model.name))
            return
        await asyncio.to_thread(model.fetch)
        # Several engines may be sent it at once, each from a copy of its own.
        name = f"{model.name}-{uuid4().hex}"
        try:
            try:
                await self._upload(porter, model, name)
            except (Unavailable, OSError) as error:
                raise PlaceLost(
                    f"a model can't be brought to the trainer's ranks: {error}"
                ) from None
            yield await _awaited(porter.weights_of.remote(name))
        finally:
            porter.remove.remote(name)

    async def _upload(self, porter: PorterHandle, model: SavedWeights, name: str) -> None:
        path = model.local_dir / FULL_WEIGHTS
        await _awaited(porter.reserve.remote(name, model.size_of(FULL_WEIGHTS)))
        for start in range(0, model.size_of(FULL_WEIGHTS), _PART_BYTES):
            part = await asyncio.to_thread(np.fromfile, path, np.uint8, _PART_BYTES, "", start)
            await _awaited(porter.upload.remote(name, part))

    async def start(self, module: str, options: Mapping[str, str], errand: str) -> "CourierThere":
        """See `Place.start`."""
        porter = self._current()
        name: str = await _awaited(porter.start.remote(module, dict(options), errand))
        return CourierThere(self, porter, name, errand)

    async def address_towards(self, url: str) -> str:
        """See `Place.address_towards`."""
        address: str = await _awaited(self._current().address_towards.remote(url))
        return address

    def is_with(self, porter: PorterHandle) -> bool:
        """Whether this is the porter that is there now."""
        return self._porter is porter

    def _current(self) -> PorterHandle:
        if self._porter is None:
            raise PlaceLost("the trainer's ranks are not there")
        return self._porter


class ModelAtRanks:
    """See `engine.trainer.RemoteModel`."""

    def __init__(self, porter: PorterHandle, contents: Contents) -> None:
        """Make what stands for a model.

        Args:
            porter: who has written it.
            contents: what that has written.
        """
        self.porter = porter
        self._files = contents.files
        self.name = contents.name
        self.size_bytes = contents.files[FULL_WEIGHTS]
        self.tensor_names = contents.tensor_names
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
            for start in range(0, size, _PART_BYTES):
                try:
                    part = waited(self.porter.read.remote(self.name, file, start))
                except PlaceLost as loss:
                    raise NotFound(f"{loss.message}; save the weights again") from None
                target.write(part.data)

    def remove(self) -> None:
        """See `RemoteModel.remove`."""
        self.porter.remove.remote(self.name)


class CourierThere:
    """A courier beside a porter; see `place.Courier`."""

    def __init__(self, place: RanksPlace, porter: PorterHandle, name: str, errand: str) -> None:
        """Make what stands for one.

        Args:
            place: where it is.
            porter: who has started it.
            name: by which that one knows it.
            errand: what it is for, for the words of errors.
        """
        self._place = place
        self._porter = porter
        self._name = name
        self._errand = errand

    async def has_ended(self) -> bool:
        """See `Courier.has_ended`. It ends with its porter."""
        if not self._place.is_with(self._porter):
            return True
        try:
            answer: bool = await _awaited(self._porter.has_ended.remote(self._name))
        except PlaceLost:
            return True
        return answer

    def tell(self, line: Json) -> None:
        """See `Courier.tell`."""
        self._porter.tell.remote(self._name, dict(line))

    async def heard(self, seconds: float) -> dict[str, Any]:
        """See `Courier.heard`."""
        said: dict[str, Any] = await _awaited(self._porter.heard.remote(self._name, seconds))
        return said

    def failure(self, reason: str) -> ServerError:
        """See `Courier.failure`."""
        return ServerError(f"{self._errand} failed: {reason}")

    async def end(self) -> None:
        """See `Courier.end`."""
        with suppress(PlaceLost):
            await _awaited(self._porter.end.remote(self._name))


def waited(answer: Any) -> Any:  # noqa: ANN401 - Ray's references, and their values, are of any type
    """Return what a porter answers, or what a rank has kept.

    Raises:
        PlaceLost: the porter has gone.
        Unavailable: what was kept has.
        WireError: what the porter raised.
    """
    try:
        return ray.get(answer)
    except RayActorError as error:
        raise PlaceLost(_ENDED) from error
    except RayError as error:
        lost = Unavailable("the ranks were lost before the weights were safe; save them again")
        raise _cause(error, lost) from error


async def _awaited(answer: Any) -> Any:  # noqa: ANN401 - as above
    """Return what a porter answers.

    Raises:
        PlaceLost: it has gone.
        WireError, OSError: what it raised.
    """
    try:
        return await answer
    except RayError as error:
        raise _cause(error, PlaceLost(_ENDED)) from error


def _cause(error: RayError, lost: WireError) -> Exception:
    """Return what a porter raised, or that something is lost if Ray raised it."""
    if not isinstance(error, RayTaskError):
        return lost
    cause = error.cause
    if isinstance(cause, RayError):
        return lost
    return cause if isinstance(cause, WireError | OSError) else error
