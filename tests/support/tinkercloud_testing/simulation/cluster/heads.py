"""Simulated heads: they load, hold models, keep journals, and save when they are asked to stop."""

import asyncio
import json
import random
from dataclasses import asdict, dataclass, field
from urllib.parse import unquote

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.launch import HeadStatus, Saved
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.simulation.cluster.connection import HeadRefused
from tinkercloud_testing.simulation.store import Store, StoreAway
from tinkercloud_testing.simulation.virtual_time import until

_RANK_BYTES = 1 << 20
_NOT_CREATED_SECONDS = 900.0
"""The same as in `tinkercloud_worker.head.durable.suspended_models`."""


@dataclass(frozen=True)
class HeadSpeed:
    """How long a head takes, in seconds."""

    load: float = 20.0
    save: float = 5.0
    step: float = 0.5


@dataclass
class Disk:
    """The scratch space of a head's pod."""

    journals: dict[str, int] = field(default_factory=dict)
    """By run: its steps."""


@dataclass
class Head:
    """One process of a head.

    Args:
        session: the TrainingSession whose pods it belongs to.
        incarnation: identity of the process.
        level: `durability.level` of its configuration.
        disk: the scratch space of its pod.
        store: the checkpoint store.
        speed: how long it takes.
        random: for the choices of the simulation.
        most_models: how many models of rank 8 its memory holds.
    """

    session: str
    incarnation: str
    level: str
    disk: Disk
    store: Store
    speed: HeadSpeed
    random: random.Random
    most_models: int = 8
    models: dict[str, int] = field(default_factory=dict)
    """By run: its steps."""
    is_loaded: bool = False
    is_stopping: bool = False
    """Whether it serves no more requests of clients."""
    is_saved: bool = False
    """Whether everything it holds is in the store."""
    is_hanging: bool = False
    """Whether it answers nothing and fails its probes."""
    is_dead: bool = False
    given_away: dict[str, float | None] = field(default_factory=dict)
    """Runs that it has given away, with the time until which it refuses them if it had not known
    them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it may be ready, or not ready any more."""
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_ready(self) -> bool:
        """Whether it passes its readiness probe."""
        return self.is_loaded and not (self.is_hanging or self.is_dead)

    @property
    def serves(self) -> bool:
        """Whether it answers clients."""
        return self.is_ready and not self.is_stopping

    async def load(self) -> None:
        """Load the base model, and the runs whose journals are on the disk."""
        await asyncio.sleep(self.speed.load)
        self.models.update(self.disk.journals)
        for run in self.models:
            self.store.claims[run] = self.incarnation
        self.is_loaded = True
        self.changed.set()

    def hang(self, *, hangs: bool) -> None:
        """Let it answer nothing, or answer again."""
        self.is_hanging = hangs
        self.changed.set()

    def kill(self) -> None:
        """End the process."""
        self.is_dead = True
        self.changed.set()

    # What clients ask for.

    async def step(self, run: str, *, known: bool) -> int | None:
        """Train one step; return the number of steps of the run, or None without an answer.

        Args:
            run: the run.
            known: whether it has been created before.
        """
        if not self.serves or not self._accepts(run, known=known):
            return None
        if run not in self.models:
            if len(self.models) >= self.most_models:
                return None
            try:
                steps = self.store.load(run, self.incarnation) if known else 0
            except StoreAway:
                return None
            self.store.claims[run] = self.incarnation
            self.models[run] = steps
        await asyncio.sleep(self.speed.step)
        if self.is_dead or run not in self.models or run in self.given_away or self.is_saved:
            return None
        if self.is_stopping:
            return None
        steps = self.models[run] + 1
        if self.level == "remote":
            try:
                self.store.save(run, steps, self.incarnation)
            except StoreAway:
                return None
        self.models[run] = steps
        if self.level != "none":
            self.disk.journals[run] = steps
        return steps

    def _accepts(self, run: str, *, known: bool) -> bool:
        """Return whether it continues a run, possibly one that it has given away and that returns.

        If it had the run last, API servers take it back; otherwise they resume it. A head that gave
        a run away before it knew it accepts it only after a while, and never creates it.
        """
        if run not in self.given_away:
            return True
        until = self.given_away[run]
        is_late = until is None or asyncio.get_running_loop().time() >= until
        is_accepted = known and (is_late or self.store.claims.get(run) == self.incarnation)
        if is_accepted:
            del self.given_away[run]
        return is_accepted

    # What the operator, the API servers and the kubelet ask for.

    async def answer(self, method: str, path: str) -> bytes:
        """Answer a request of the operator.

        Raises:
            HeadRefused: it answers with an error.
        """
        await until(lambda: not self.is_hanging or self.is_dead)
        await asyncio.sleep(self.random.uniform(0.001, 0.05))
        if self.is_dead:
            raise HeadRefused(502, "the connection was closed")
        if path == routes.HEAD_STATUS:
            return self._status()
        if not self.is_loaded:
            raise HeadRefused(503, "the session head is loading its model; send it again")
        try:
            return await self._do(method, path)
        except StoreAway as error:
            raise HeadRefused(503, str(error)) from None

    async def _do(self, method: str, path: str) -> bytes:
        route, _, run = unquote(path).rpartition("/")
        match method, route:
            case ("POST", "") if path == routes.HEAD_SUSPEND:
                await self.save_all()
            case ("POST", "") if path == routes.HEAD_CHECKPOINT:
                return await self._checkpoint([*self.models])
            case ("POST", routes.HEAD_CHECKPOINT) if run in self.models:
                return await self._checkpoint([run])
            case ("DELETE", routes.HEAD_MODELS):
                self._drop(run)
                self.given_away.pop(run, None)
            case ("POST", routes.HEAD_MOVE_MODEL):
                await self._give_away(run)
            case ("DELETE", routes.HEAD_MOVE_MODEL):
                self.given_away.pop(run, None)
            case _:
                raise HeadRefused(404, f"{method} {path}")
        return b""

    async def save_all(self) -> None:
        """Save every model in order to stop; the head serves no client from then on.

        Raises:
            StoreAway: the store does not respond.
            HeadRefused: it was killed meanwhile.
        """
        self.is_stopping = True
        async with self._saving:
            if self.is_saved:
                return
            if self.models:
                await asyncio.sleep(self.speed.save)
            if self.is_dead:
                raise HeadRefused(502, "the connection was closed")
            self.store.check()
            for run, steps in self.models.items():
                self.store.save(run, steps, self.incarnation)
            self.is_saved = True

    async def terminate(self) -> None:
        """Save everything after SIGTERM, and again if that fails."""
        if self.disk.journals:
            await until(lambda: self.is_loaded or self.is_dead)
        while not self.is_dead:
            try:
                await self.save_all()
            except StoreAway:
                await asyncio.sleep(5.0)
            except HeadRefused:
                return
            else:
                return

    def unsaved(self) -> dict[str, int]:
        """Return the runs whose last steps are not in the store."""
        claimed = {
            run: steps
            for run, steps in self.models.items()
            if self.store.claims.get(run) == self.incarnation
        }
        return {
            run: steps for run, steps in claimed.items() if steps > self.store.steps.get(run, 0)
        }

    async def _checkpoint(self, runs: list[str]) -> bytes:
        await asyncio.sleep(self.speed.save)
        if self.is_dead:
            raise HeadRefused(502, "the connection was closed")
        self.store.check()
        for run in runs:
            self.store.checkpoints[run] = self.models.get(run, 0)
        paths = [f"tinker://{run}/weights/last" for run in runs]
        return Saved(checkpoints=paths).model_dump_json().encode()

    def _drop(self, run: str) -> None:
        self.models.pop(run, None)
        self.disk.journals.pop(run, None)

    async def _give_away(self, run: str) -> None:
        if run in self.given_away:
            return
        await asyncio.sleep(min(2.0, self.speed.save))
        self.store.check()
        refuses_until = None
        if run in self.models:
            self.store.save(run, self.models[run], self.incarnation)
            self._drop(run)
        else:
            refuses_until = asyncio.get_running_loop().time() + _NOT_CREATED_SECONDS
        self.given_away[run] = refuses_until

    def _status(self) -> bytes:
        held, size = len(self.models), 8 * _RANK_BYTES
        more = max(0, self.most_models - held)
        capacity = HeadCapacity(
            models=held,
            model_bytes=size if held else 0,
            pass_bytes=0,
            free_bytes=more * size,
            more_models=more if held else None,
            held=tuple(self.models),
            rank_bytes=_RANK_BYTES,
        )
        status = HeadStatus.model_construct(
            head=self.session,
            generation="0",
            model_name=self.session,
            ready=self.is_ready,
            models=[*self.models],
            samplers=0,
            pending_requests=0,
            idle_seconds=0.0,
        )
        return json.dumps({**status.model_dump(), "capacity": asdict(capacity)}).encode()
