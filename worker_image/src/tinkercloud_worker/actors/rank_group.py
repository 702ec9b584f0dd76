"""A group of ranks that start together, run one command at a time, and end together.

A command goes to all ranks, and the next one starts when all have answered. So the collective
operations of two commands never interleave, whichever threads run them. The group fails as a whole:
a rank that dies, or raises anything but a client error, leaves others waiting in a collective
operation, so all ranks are ended and the command fails immediately. Before that, state from which
another group can continue is salvaged from a surviving rank. A client error that all ranks raise
alike ends nothing and is raised to the caller.

Starting has a deadline. A start that fails leaves neither actors nor a placement group.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_worker.actors import failure_causes
from tinkercloud_worker.actors.rank import SALVAGE, Rank, RankAnswer, RankLocation, Worker
from tinkercloud_worker.actors.shared_tensors import send_through_shared_memory
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.turns import rank_times

log = structlog.get_logger(__name__)
_STARTS = 3
"""Attempts to start Ray, whose limit of half a minute may be too short on a busy machine."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray abandons a worker that takes a minute to start, and then waits for it in vain;
    # for its cluster state store (GCS) the limit is half a minute.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_port_wait_time_s": "120",
    # Ray would kill ranks when the machine's memory is nearly used up, by any process, and counts
    # the page cache of model files.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Settings of a Ray cluster that is started here; the environment overrides them."""
_SETTINGS_WITHOUT_GPUS = {
    # Nothing is compiled for CPUs, but megatron-core would load the compiler, which takes seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_MORE_TIME = "raise trainer.start_timeout_seconds (of a BaseModel: trainer.startTimeoutSeconds)"
_STOPPING = "ranks can't be started: this session head is stopping"
_SLICE_SECONDS = 1.0
"""Length of one wait. Ray has no interruptible waits, so another thread can only end them between
two."""


class RanksUnavailable(Unavailable):
    """The group could not be started; the message says why."""


class RanksLost(StateLost):
    """A rank died or failed, and with it the group and its models."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Number, resources and placement of ranks."""

    ranks: int
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Ray's placement strategy. PACK: on as few nodes as possible; SPREAD: on as many as
    possible."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one rank, as a Ray placement bundle."""
        wanted = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def backend(self) -> str:
        """Communication backend of the ranks, as `torch.distributed` names it."""
        return accelerator.backend_of_ranks(self.gpus_per_rank)


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """Timeouts, in seconds."""

    start: float = 1800.0
    """Until every rank is placed, has joined the group, and has loaded the model."""
    collective: float = 1800.0
    """How long a collective operation waits for a live rank. At least `start`: a rank that has
    loaded may wait in a collective operation for one that has not."""
    salvage: float = 120.0
    """How long a rank of a lost group may take to return its state."""


def connect(shape: GroupShape) -> None:
    """Join the Ray cluster of this process, or start one on this machine."""
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
            # Ray raises no more specific type.
            if attempt == _STARTS:
                raise
            log.warning("Ray failed to start; retrying", attempt=attempt, exc_info=True)
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
    """See the module. Threads may share a group: their commands run one after another."""

    def __init__(
        self,
        shape: GroupShape,
        factory: Callable[[], Worker],
        timings: GroupTimings | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Start the ranks, and return when each has created its worker object.

        Args:
            shape: number and resources of the ranks. `connect` must have been called.
            factory: creates the worker object. Called once in each rank's process after
                `torch.distributed` is initialized; it must be importable there.
            timings: timeouts.
            cancelled: once another thread sets it, the start fails within `_SLICE_SECONDS`.

        Raises:
            RanksUnavailable: resources are missing, or a rank failed to start; everything that had
                started is removed.
        """
        self.shape = shape
        self._timings = timings or GroupTimings()
        self._cancelled = cancelled or threading.Event()
        self._one_at_a_time = threading.Lock()
        self._loss: str | None = None
        self._ranks: list[ActorHandle[Rank]] = []
        self.salvaged: Any = None
        """Once the group is lost: the result of `salvage` at a surviving rank; None if there is
        none."""
        self._placement_group: PlacementGroup | None = None
        try:
            self._start(factory, time.monotonic() + self._timings.start)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the group accepts commands."""
        return self._loss is None

    @property
    def loss(self) -> str | None:
        """How the group was lost, or that it was closed; None if it accepts commands."""
        return self._loss

    def call(self, method: str, *args: object) -> Any:  # noqa: ANN401 - the method's own result
        """Call a method of the worker object at all ranks, and return the result of rank 0.

        Tensors are passed and returned in shared memory: see `actors.shared_tensors`.

        Raises:
            RanksLost: a rank died or failed, now or earlier.
            WireError: the error that the method raised at every rank.
        """
        shared = ray.put(args)
        return self._command(
            method,
            lambda i, rank: (rank.call_without_result if i else rank.call).remote(method, shared),
        )[0]

    def call_in_parts(self, method: str, *args: object) -> list[tuple[Any, list[Any]]]:
        """Like `call`, for a method that yields parts: those stay on the nodes of the ranks.

        Returns:
            For each rank, the value that its method returned, and references to what it yielded.
            This process owns the parts: they outlive the group, and are freed with the references.
        """
        shared = ray.put(args)
        streams: dict[Any, Any] = {}

        def submit(_: int, rank: "ActorHandle[Rank]") -> Any:  # noqa: ANN401 - Ray's references are of any type
            stream: Any = rank.call_in_parts
            stream = stream.options(num_returns="streaming").remote(method, shared)
            end = stream.completed()
            streams[end] = stream
            return end

        def answer(end: Any) -> RankAnswer:  # noqa: ANN401 - as above
            ray.get(end)
            *parts, last = streams.pop(end)
            # This raises what the method has raised.
            returned: RankAnswer = ray.get(last)
            return replace(returned, value=(returned.value, parts))

        return self._command(method, submit, answer)

    def location(self) -> RankLocation:
        """Return the location of rank 0.

        Raises:
            RanksLost: see `call`.
        """
        locations: list[RankLocation] = self._command(
            "location", lambda _, rank: rank.location.remote()
        )
        return locations[0]

    def call_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Like `call`, with separate arguments for each rank; return the results of all ranks."""
        return self._command(method, lambda i, rank: rank.call.remote(method, args[i]))

    def call_independently(self, method: str, *args: object) -> Any:  # noqa: ANN401 - as in `call`
        """Call a method in which no rank needs another; return the result of one rank.

        If one rank has completed it, all surviving ranks have. So the loss of a rank ends the
        group, but the command has taken effect, and the salvaged state includes it.

        Raises:
            RanksLost: the group was lost before, or no rank survives.
            WireError: the error that the method raised at every rank.
        """
        answers, _ = self._independent(method, args)
        if not answers:
            raise RanksLost(self._loss or "")
        return self._agreed(method, answers)[0]

    def call_all_independently(self, method: str, *args: object) -> list[Any]:
        """Like `call_independently`, but all ranks must survive; return the results of all.

        Raises:
            RanksLost: a rank died or failed, now or earlier.
            WireError: the error that the method raised at every rank.
        """
        answers, is_lost = self._independent(method, args)
        if is_lost:
            raise RanksLost(self._loss or "")
        return self._agreed(method, answers)

    def _independent(self, method: str, args: tuple[object, ...]) -> tuple[list[RankAnswer], bool]:
        """Return the answers of the surviving ranks, and whether one was lost, with the group."""
        with self._one_at_a_time:
            self._check_alive()
            shared = ray.put(args)
            refs = [rank.call.remote(method, shared) for rank in self._ranks]
            answers, failed = failure_causes.answers_and_failures(refs)
            if failed:
                rank, error = next(iter(failed.items()))
                alive = [r for r, each in failed.items() if not isinstance(each, RayActorError)]
                reason = (
                    f"rank {rank} of {len(refs)} failed in {method}: {failure_causes.reason(error)}"
                )
                # Ranks that have completed the command come first, so that the state includes it.
                self._end(reason, [*answers, *alive])
        return [*answers.values()], bool(failed)

    def close(self) -> None:
        """End all ranks and free their resources. Running commands fail. Idempotent."""
        self._loss = self._loss or "the group was closed"
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks.clear()
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None

    def _start(self, factory: Callable[[], Worker], deadline: float) -> None:
        size = self.shape.ranks
        if self._cancelled.is_set():
            raise RanksUnavailable(_STOPPING)
        self._placement_group = placement_group(
            [self.shape.bundle] * size, strategy=self.shape.strategy
        )
        if not self._wait_until(self._placement_group.wait, deadline):
            raise RanksUnavailable(
                f"insufficient capacity: {size} ranks of {self.shape.bundle} could not be scheduled"
                f" within {self._timings.start:.0f} s ({_resources()}); add workers, reduce the"
                f" number or size of ranks, or {_MORE_TIME}"
            )
        nodes = placement_group_table(self._placement_group)["bundles_to_node_id"]
        self._ranks = [self._place_rank(i, self._placement_group) for i in grouped_by_node(nodes)]
        [address] = self._wait_for([self._ranks[0].open_store.remote(size)], "open", deadline)
        seconds = max(self._timings.collective, self._timings.start)
        self._wait_for(
            [
                rank.join.remote(i, size, address, seconds, self.shape.backend)
                for i, rank in enumerate(self._ranks)
            ],
            "join the group",
            deadline,
        )
        self._wait_for([r.build.remote(factory) for r in self._ranks], "load", deadline)

    def _place_rank(self, index: int, group: PlacementGroup) -> "ActorHandle[Rank]":
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
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
                    f"rank {rank} of {self.shape.ranks} failed to {step}:"
                    f" {failure_causes.reason(error)}"
                ) from error
        return list(ray.get(refs))

    def _wait_until(self, wait: Callable[[float], bool], deadline: float) -> bool:
        """Wait for a condition in slices; return whether it was met in time.

        Args:
            wait: waits up to the given seconds; returns whether the condition is met.
            deadline: on the monotonic clock.

        Raises:
            RanksUnavailable: the start was cancelled.
        """
        while not wait(min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._cancelled.is_set():
                raise RanksUnavailable(_STOPPING)
            if time.monotonic() >= deadline:
                return False
        return True

    def _command(
        self,
        method: str,
        submit: Callable[[int, "ActorHandle[Rank]"], Any],
        answer: Callable[[Any], RankAnswer] = ray.get,
    ) -> list[Any]:
        """Run a command at all ranks; return their values.

        Args:
            method: its name, for messages.
            submit: starts it at a rank; returns a reference to its end.
            answer: returns the answer of a rank from that reference, or raises RayError.
        """
        with self._one_at_a_time:
            self._check_alive()
            refs = [submit(i, rank) for i, rank in enumerate(self._ranks)]
            answers = self._answers(method, refs, answer)
        return self._agreed(method, answers)

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise RanksLost(self._loss)

    def _agreed(self, method: str, answers: Sequence[RankAnswer]) -> list[Any]:
        rank_times.note(method, [answer.times for answer in answers])
        refused = [answer.refusal for answer in answers if answer.refusal is not None]
        if refused and len(refused) < len(answers):
            reason = f"some ranks rejected {method} ({refused[0].message}) and others did not"
            self._end(reason, [])
            raise RanksLost(reason)
        if refused:
            raise refused[0]
        return [answer.value for answer in answers]

    def _answers(
        self, method: str, refs: list[Any], answer: Callable[[Any], RankAnswer]
    ) -> list[RankAnswer]:
        answers: dict[Any, RankAnswer] = {}
        pending = list(refs)
        while pending:
            # The failure of a rank is noticed immediately, whatever the others wait for.
            done, pending = ray.wait(pending, num_returns=1)
            try:
                answers[done[0]] = answer(done[0])
            except RayError as error:
                log.exception("a rank failed", command=method)
                rank, cause = failure_causes.cause(refs, refs.index(done[0]), error)
                reason = (
                    f"rank {rank} of {len(refs)} failed in {method}: {failure_causes.reason(cause)}"
                )
                # A live rank may have failed because another died, and still has its state.
                dead = {rank} if isinstance(cause, RayActorError) else set()
                self._end(reason, [r for r in range(len(refs)) if r not in dead])
                raise RanksLost(reason) from error
        return [answers[ref] for ref in refs]

    def _end(self, reason: str, sources: Sequence[int]) -> None:
        """End the group, after salvaging state from the first of these ranks that responds."""
        self._loss = reason
        for rank in sources:
            # The rank may hang in a collective operation; this method runs concurrently.
            actor = self._ranks[rank]
            state: Any = actor.salvage.options(concurrency_group=SALVAGE).remote()
            try:
                self.salvaged = ray.get(state, timeout=self._timings.salvage)
                break
            except RayError:
                log.warning(
                    "a rank of a lost group does not return its state", rank=rank, exc_info=True
                )
        self.close()


def _is_any_done(refs: list[Any], seconds: float) -> bool:
    done, _ = ray.wait(refs, num_returns=1, timeout=seconds)
    return bool(done)


def grouped_by_node(nodes: Mapping[int, str]) -> list[int]:
    """Return placement bundles in rank order, grouped by node.

    Ranks with consecutive numbers shard the same matrices, and communicate most.

    Args:
        nodes: node id of each bundle.
    """
    return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))


def _resources() -> str:
    known: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    counts = (f"{free.get(name, 0):g} of {known.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return f"free in the Ray cluster: {', '.join(counts)}"
