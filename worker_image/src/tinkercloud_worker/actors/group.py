"""A group of ranks: started together, given one command at a time, ended together.

A command goes to all ranks, and the next one begins when all have answered. So two commands can
never interleave their collective operations, whichever threads give them. The group is lost as a
whole: a rank that dies, or raises what is no client error, leaves others waiting in a collective
operation, so all of them are ended and the caller is told at once. Before that, state is salvaged
from one that lives: what another group can go on with. A client error that all ranks raise alike
ends nothing; it is raised as it is.

Starting has a deadline. Whatever goes wrong until then leaves neither actors nor a placement group
behind.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinkercloud_protocol.errors import StateLost, Unavailable
from tinkercloud_worker.actors.rank import SALVAGE, Answer, Rank, RankLocation, Worker
from tinkercloud_worker.actors.tensors import send_through_shared_memory
from tinkercloud_worker.device import accelerator

log = structlog.get_logger(__name__)
_STARTS = 3
"""Ray gives a node of its own half a minute to come up, which a busy machine may need more than."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A rank that takes a minute to come up is given up, and then waited for in vain; Ray gives its
    # own store of the cluster's state up after half of one.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_port_wait_time_s": "120",
}
"""Of a Ray cluster that is started here, unless the environment says otherwise."""
_SETTINGS_WITHOUT_GPUS = {
    # Nothing is compiled for CPUs, and yet megatron-core loads the compiler, for seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_MORE_TIME = "raise trainer.start_timeout_seconds (of a BaseModel: trainer.startTimeoutSeconds)"
_ECHO_SECONDS = 2.0
"""A rank that waits for one that dies may fail before that death is known. How long to wait for
the news of it, to tell the cause from its consequence."""

_STOPPING = "no ranks are started any more: this session head is stopping"
_SLICE_SECONDS = 1.0
"""Of a wait that another thread may end: Ray has none that can be ended."""


class RanksUnavailable(Unavailable):
    """The group could not be started; the message says what was missing."""


class RanksLost(StateLost):
    """A rank died or failed, and with it the group and what its ranks held."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How many ranks, what each takes, and where they go."""

    ranks: int
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """PACK: on as few nodes as possible; SPREAD: on as many. Ray's own words."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one rank takes, as Ray counts it."""
        wanted = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def backend(self) -> str:
        """What the ranks communicate by, as `torch.distributed` names it."""
        return accelerator.backend_of_ranks(self.gpus_per_rank)


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """Durations, in seconds."""

    start: float = 1800.0
    """Until every rank has a place, has met the others and has loaded what it works with."""
    collective: float = 1800.0
    """How long an operation of all ranks waits for one that lives but does not come. No less than
    `start`: one that has loaded may wait in one for another that has not."""
    salvage: float = 120.0
    """How long each rank of a lost group may take to hand over its state."""


def connect(shape: GroupShape) -> None:
    """Join the Ray cluster this process belongs to, or start one of its own on this machine."""
    if not ray.is_initialized():
        _join_or_start(shape)
    send_through_shared_memory()


def _join_or_start(shape: GroupShape) -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address, log_to_driver=False, configure_logging=False)
        return
    settings = _SETTINGS if shape.gpus_per_rank else _SETTINGS | _SETTINGS_WITHOUT_GPUS
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, _STARTS + 1):
        try:
            _start_cluster(shape)
        except Exception:
            # Ray raises nothing more definite.
            if attempt == _STARTS:
                raise
            log.warning("Ray did not start; starting it again", attempt=attempt, exc_info=True)
        else:
            return


def _start_cluster(shape: GroupShape) -> None:
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
        self,
        shape: GroupShape,
        factory: Callable[[], Worker],
        timings: GroupTimings | None = None,
        give_up: threading.Event | None = None,
    ) -> None:
        """Start the ranks, and return when each has made its worker object.

        Args:
            shape: what to start. `connect` must have been called.
            factory: called once in each rank's process, where `torch.distributed` is ready; it
                is sent there, so it must be importable.
            timings: deadlines.
            give_up: the start fails within `_SLICE_SECONDS` once another thread sets it.

        Raises:
            RanksUnavailable: resources lack, or a rank failed to start; nothing is left behind.
        """
        self.shape = shape
        self._timings = timings or GroupTimings()
        self._give_up = give_up or threading.Event()
        self._one_at_a_time = threading.Lock()
        self._loss: str | None = None
        self._ranks: list[ActorHandle[Rank]] = []
        self.salvaged: Any = None
        """Once the group is lost: what `salvage` returned at one of the ranks that lived; None if
        there was none."""
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

    @property
    def loss(self) -> str | None:
        """How it was lost, or that it was closed; None if it takes commands."""
        return self._loss

    def call(self, method: str, *args: object) -> Any:  # noqa: ANN401 - the method's own result
        """Have all ranks call a method of their object, and return what it returned at rank 0.

        Tensors, either way, are in memory that processes share: see `actors.tensors`.

        Raises:
            RanksLost: a rank died or failed, now or earlier.
            WireError: what the method raised, the same at every rank.
        """
        shared = ray.put(args)
        return self._command(
            method,
            lambda i, rank: (rank.call_without_result if i else rank.call).remote(method, shared),
        )[0]

    def call_by_reference(self, method: str, *args: object) -> Any:  # noqa: ANN401 - Ray's references are of any type
        """Like `call`, but what rank 0 returned stays on its node.

        Returns:
            A reference to it, which lasts no longer than the group.
        """
        shared = ray.put(args)
        [reference] = self._command(
            method,
            lambda i, rank: (rank.call_without_result if i else rank.call_by_reference).remote(
                method, shared
            ),
        )[0]
        return reference

    def location(self) -> RankLocation:
        """Return where rank 0 is.

        Raises:
            RanksLost: as `call`.
        """
        locations: list[RankLocation] = self._command(
            "location", lambda _, rank: rank.location.remote()
        )
        return locations[0]

    def call_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Like `call`, with arguments of its own for each rank, and a result from each."""
        return self._command(method, lambda i, rank: rank.call.remote(method, args[i]))

    def call_independently(self, method: str, *args: object) -> Any:  # noqa: ANN401 - as in `call`
        """Have all ranks call a method in which none needs another; return what one returned.

        If one rank has done it, all that live have done it. So a rank that is lost meanwhile ends
        the group, but the command has been carried out, and its effect is in what is salvaged.

        Raises:
            RanksLost: the group had been lost before, or no rank lives.
            WireError: what the method raised, the same at every rank.
        """
        with self._one_at_a_time:
            self._check_alive()
            shared = ray.put(args)
            refs = [rank.call.remote(method, shared) for rank in self._ranks]
            answers, failures = _answers_and_failures(refs)
            if failures:
                rank, error = next(iter(failures.items()))
                alive = [r for r, each in failures.items() if not isinstance(each, RayActorError)]
                reason = f"rank {rank} of {len(refs)} failed in {method}: {_reason(error)}"
                # Those that have done it come first, so that its effect is salvaged.
                self._end(reason, [*answers, *alive])
        if not answers:
            raise RanksLost(self._loss or "")
        return self._agreed(method, [*answers.values()])[0]

    def close(self) -> None:
        """End all ranks and free their resources. Running commands fail; repeating is harmless."""
        self._loss = self._loss or "the group was closed"
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks.clear()
        if self._places is not None:
            remove_placement_group(self._places)
            self._places = None

    def _start(self, factory: Callable[[], Worker], deadline: float) -> None:
        size = self.shape.ranks
        if self._give_up.is_set():
            raise RanksUnavailable(_STOPPING)
        self._places = placement_group([self.shape.bundle] * size, strategy=self.shape.strategy)
        if not self._wait_until(self._places.wait, deadline):
            raise RanksUnavailable(
                f"no room for {size} ranks of {self.shape.bundle} within"
                f" {self._timings.start:.0f} s: {_resources()}; add workers, ask for fewer or"
                f" smaller ranks, or {_MORE_TIME}"
            )
        nodes = placement_group_table(self._places)["bundles_to_node_id"]
        self._ranks = [self._place_rank(i, self._places) for i in grouped_by_node(nodes)]
        [address] = self._wait_for([self._ranks[0].open_store.remote(size)], "open", deadline)
        seconds = max(self._timings.collective, self._timings.start)
        self._wait_for(
            [
                rank.join.remote(i, size, address, seconds, self.shape.backend)
                for i, rank in enumerate(self._ranks)
            ],
            "meet the others",
            deadline,
        )
        self._wait_for([r.build.remote(factory) for r in self._ranks], "load", deadline)

    def _place_rank(self, index: int, places: PlacementGroup) -> "ActorHandle[Rank]":
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=places, placement_group_bundle_index=index
        )
        remote: Any = ray.remote  # whose type knows no concurrency groups
        actor = remote(
            num_cpus=self.shape.cpus_per_rank,
            num_gpus=self.shape.gpus_per_rank,
            max_restarts=0,
            concurrency_groups={SALVAGE: 1},
            scheduling_strategy=strategy,
        )(Rank)
        return cast("ActorHandle[Rank]", actor.remote())

    def _wait_for(self, refs: list[Any], step: str, deadline: float) -> list[Any]:
        pending = list(refs)
        while pending:
            if not self._wait_until(partial(_is_any_done, pending), deadline):
                late = [refs.index(ref) for ref in pending]
                raise RanksUnavailable(
                    f"ranks {late} of {self.shape.ranks} did not {step} within"
                    f" {self._timings.start:.0f} s; {_MORE_TIME}"
                )
            done, pending = ray.wait(pending, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                rank = refs.index(done[0])
                raise RanksUnavailable(
                    f"rank {rank} of {self.shape.ranks} failed to {step}: {_reason(error)}"
                ) from error
        return list(ray.get(refs))

    def _wait_until(self, wait: Callable[[float], bool], deadline: float) -> bool:
        """Wait for something, in slices; return whether it came about in time.

        Args:
            wait: for as many seconds; returns whether it has come about.
            deadline: by the monotonic clock.

        Raises:
            RanksUnavailable: nobody wants the group any more.
        """
        while not wait(min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._give_up.is_set():
                raise RanksUnavailable(_STOPPING)
            if time.monotonic() >= deadline:
                return False
        return True

    def _command(self, method: str, submit: Callable[[int, "ActorHandle[Rank]"], Any]) -> list[Any]:
        with self._one_at_a_time:
            self._check_alive()
            answers = self._answers(method, [submit(i, rank) for i, rank in enumerate(self._ranks)])
        return self._agreed(method, answers)

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise RanksLost(self._loss)

    def _agreed(self, method: str, answers: Sequence[Answer]) -> list[Any]:
        refused = [answer.refusal for answer in answers if answer.refusal is not None]
        if refused and len(refused) < len(answers):
            reason = f"some ranks refused {method} ({refused[0].message}) and others did not"
            self._end(reason, [])
            raise RanksLost(reason)
        if refused:
            raise refused[0]
        return [answer.value for answer in answers]

    def _answers(self, method: str, refs: list[Any]) -> list[Answer]:
        pending = list(refs)
        while pending:
            # The failure of a rank is known at once, whatever the others wait for.
            done, pending = ray.wait(pending, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                log.exception("a rank failed", command=method)
                rank, cause = _cause(refs, refs.index(done[0]), error)
                reason = f"rank {rank} of {len(refs)} failed in {method}: {_reason(cause)}"
                # One that lives may have failed because another died, and still has its state.
                dead = {rank} if isinstance(cause, RayActorError) else set()
                self._end(reason, [r for r in range(len(refs)) if r not in dead])
                raise RanksLost(reason) from error
        return list(ray.get(refs))

    def _end(self, reason: str, sources: Sequence[int]) -> None:
        """End the group, after salvaging the state of the first of some ranks that answers."""
        self._loss = reason
        for rank in sources:
            # The rank may hang in a collective operation: this runs concurrently.
            actor = self._ranks[rank]
            state: Any = actor.salvage.options(concurrency_group=SALVAGE).remote()
            try:
                self.salvaged = ray.get(state, timeout=self._timings.salvage)
                break
            except RayError:
                log.warning("a rank of a lost group says nothing", rank=rank, exc_info=True)
        self.close()


def _is_any_done(refs: list[Any], seconds: float) -> bool:
    done, _ = ray.wait(refs, num_returns=1, timeout=seconds)
    return bool(done)


def grouped_by_node(nodes: Mapping[int, str]) -> list[int]:
    """Return places in the order of their ranks: those of a node follow each other.

    Ranks that share each matrix have numbers that follow each other, and talk most.

    Args:
        nodes: the node of each place.
    """
    return sorted(nodes, key=lambda place: (nodes[place], place))


def _answers_and_failures(refs: Sequence[Any]) -> tuple[dict[int, Answer], dict[int, RayError]]:
    """Wait for all ranks; return the answers and the failures, by rank."""
    answers: dict[int, Answer] = {}
    failures: dict[int, RayError] = {}
    for rank, ref in enumerate(refs):
        try:
            answers[rank] = ray.get(ref)
        except RayError as error:
            log.exception("a rank failed")
            failures[rank] = error
    return answers, failures


def _cause(refs: Sequence[Any], rank: int, first: RayError) -> tuple[int, RayError]:
    """Return which rank failed first, and how: a death rather than its consequence at another.

    Args:
        refs: of what ranks answer.
        rank: the first whose failure was known.
        first: that failure.
    """
    if isinstance(first, RayActorError):
        # Ranks that wait for it may be ended too, by NCCL's watchdog, at about the same time.
        return rank, first
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ECHO_SECONDS)
    failures: list[tuple[int, RayError]] = []
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            failures.append((refs.index(ref), error))
    return min(failures, key=lambda failure: not isinstance(failure[1], RayActorError))


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
