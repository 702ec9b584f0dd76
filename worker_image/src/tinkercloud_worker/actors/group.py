"""A group of ranks: started together, given one command at a time, ended together.

A command goes to all ranks, and the next one begins when all have answered. So two commands can
never interleave their collective operations, whoever gives them. The group stands or falls as one:
a rank that dies, or fails in a way it can't answer for, leaves others waiting in a collective
operation, so all of them are ended and whoever waits is told at once. A client error that all ranks
agree on is none of that; it is raised as it is.

Starting has a deadline. Whatever goes wrong until then leaves neither actors nor a placement group
behind.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinkercloud_protocol.errors import StateLost, Unavailable
from tinkercloud_worker.actors.rank import Answer, Rank

log = structlog.get_logger(__name__)


class RanksUnavailable(Unavailable):
    """The group could not be started; the message says what lacked."""


class RanksLost(StateLost):
    """A rank died or failed, and with it the group and what its ranks held."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How many ranks, what each takes, and where they go."""

    ranks: int
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """PACK: on as few nodes as possible; SPREAD: on as many."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one rank takes, as Ray counts it."""
        wanted = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """Durations, in seconds."""

    start: float = 1800.0
    """Until every rank has a place, has met the others and has loaded what it works with."""
    collective: float = 1800.0
    """How long an operation of all ranks waits for one that lives but does not come."""


def connect(shape: GroupShape) -> None:
    """Join the Ray cluster this process belongs to, or start one of its own on this machine."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address, log_to_driver=False, configure_logging=False)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cores = max(shape.ranks * shape.cpus_per_rank, os.cpu_count() or 1)
    ray.init(
        "local",
        num_cpus=int(cores),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )


class RankGroup:
    """See the module. Threads may share it: their commands wait for each other."""

    def __init__(
        self, shape: GroupShape, factory: Callable[[], object], timings: GroupTimings | None = None
    ) -> None:
        """Start the ranks, and return when each has made its worker object.

        Args:
            shape: what to start. `connect` must have been called.
            factory: called once in each rank's process, where `torch.distributed` is ready; it
                is sent there, so it must be importable.
            timings: deadlines.

        Raises:
            RanksUnavailable: resources lack, or a rank failed to start; nothing is left behind.
        """
        self.shape = shape
        self._timings = timings or GroupTimings()
        self._one_at_a_time = threading.Lock()
        self._loss: str | None = None
        self._ranks: list[ActorHandle[Rank]] = []
        self._places: PlacementGroup | None = None
        try:
            self._start(factory, time.monotonic() + self._timings.start)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it takes commands."""
        return self._loss is None

    def call(self, method: str, *args: object) -> Any:  # noqa: ANN401 - the method's own result
        """Have all ranks call a method of their object, and return what it returned at rank 0.

        Raises:
            RanksLost: a rank died or failed, now or earlier.
            WireError: what the method raised, the same at every rank.
        """
        shared = ray.put(args)
        return self._command(
            method, lambda i, rank: (rank.obey if i else rank.call).remote(method, shared)
        )[0]

    def call_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Like `call`, with arguments of its own for each rank, and a result from each."""
        return self._command(method, lambda i, rank: rank.call.remote(method, args[i]))

    def close(self) -> None:
        """End all ranks and give their place back. What runs fails; repeating this is harmless."""
        self._loss = self._loss or "the group was closed"
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks.clear()
        if self._places is not None:
            remove_placement_group(self._places)
            self._places = None

    def _start(self, factory: Callable[[], object], deadline: float) -> None:
        size = self.shape.ranks
        self._places = placement_group([self.shape.bundle] * size, strategy=self.shape.strategy)
        if not self._places.wait(max(0.0, deadline - time.monotonic())):
            raise RanksUnavailable(
                f"no room for {size} ranks of {self.shape.bundle} within"
                f" {self._timings.start:.0f} s: {_resources()}; add workers, or ask for fewer or"
                " smaller ranks"
            )
        self._ranks = [self._place_rank(i, self._places) for i in range(size)]
        [address] = self._wait_for([self._ranks[0].open_store.remote(size)], "open", deadline)
        seconds = self._timings.collective
        self._wait_for(
            [r.join.remote(i, size, address, seconds) for i, r in enumerate(self._ranks)],
            "meet the others",
            deadline,
        )
        self._wait_for([r.build.remote(factory) for r in self._ranks], "load", deadline)

    def _place_rank(self, index: int, places: PlacementGroup) -> "ActorHandle[Rank]":
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=places, placement_group_bundle_index=index
        )
        rank = ray.remote(Rank).options(
            num_cpus=self.shape.cpus_per_rank,
            num_gpus=self.shape.gpus_per_rank,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return cast("ActorHandle[Rank]", rank.remote())

    def _wait_for(self, refs: list[Any], step: str, deadline: float) -> list[Any]:
        pending = list(refs)
        while pending:
            seconds = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=seconds)
            if not done:
                late = [refs.index(ref) for ref in pending]
                raise RanksUnavailable(
                    f"ranks {late} of {self.shape.ranks} did not {step} within"
                    f" {self._timings.start:.0f} s"
                )
            try:
                ray.get(done)
            except RayError as error:
                rank = refs.index(done[0])
                raise RanksUnavailable(
                    f"rank {rank} of {self.shape.ranks} failed to {step}: {_reason(error)}"
                ) from error
        return list(ray.get(refs))

    def _command(self, method: str, submit: Callable[[int, "ActorHandle[Rank]"], Any]) -> list[Any]:
        with self._one_at_a_time:
            if self._loss is not None:
                raise RanksLost(self._loss)
            answers = self._answers(method, [submit(i, rank) for i, rank in enumerate(self._ranks)])
        refused = [answer.refusal for answer in answers if answer.refusal is not None]
        if refused and len(refused) < len(answers):
            self._lose(f"some ranks refused {method} ({refused[0].message}) and others did not")
        if refused:
            raise refused[0]
        return [answer.value for answer in answers]

    def _answers(self, method: str, refs: list[Any]) -> list[Answer]:
        pending = list(refs)
        while pending:
            # A rank that fails is heard of at once, whatever the others wait for.
            done, pending = ray.wait(pending, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                log.exception("a rank failed", command=method)
                rank = refs.index(done[0])
                self._lose(f"rank {rank} of {len(refs)} failed in {method}: {_reason(error)}")
        return list(ray.get(refs))

    def _lose(self, reason: str) -> None:
        self._loss = f"{reason}; create the model again from its last checkpoint"
        self.close()
        raise RanksLost(self._loss)


def _reason(error: RayError) -> str:
    if isinstance(error, RayActorError):
        return "its process ended"
    cause = getattr(error, "cause", None) or error
    last_line = str(cause).strip().rpartition("\n")[2]
    return f"{type(cause).__name__}: {last_line}"


def _resources() -> str:
    known: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    counts = (f"{free.get(name, 0):g} of {known.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"in Ray's cluster {' and '.join(counts)} are free"
