"""Computes the uploaded losses of a head, where they may die.

Each owner whose losses are computed has a process, which computes one task at a time. Owners take
turns for the processes, whose number is limited. A process that a loss has ended is replaced at
once, in the background: the owner's next loss finds another one ready.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.custom_losses.messages import CostTask, LossTask, LossValues, TaskMemory
from tinkercloud_worker.custom_losses.nursery import LossChild, Nursery, NurseryLost, TaskLimits

log = logging.getLogger(__name__)

T = TypeVar("T")


class Limits(Protocol):
    """What losses may take; see `tinkercloud_protocol.losses.loss_limits`."""

    @property
    def max_loss_processes(self) -> int:
        """Processes at the same time."""

    @property
    def max_loss_bytes(self) -> int:
        """Memory of a process."""

    @property
    def max_loss_seconds(self) -> float:
        """Time of a request."""

    @property
    def max_loss_cpu_seconds(self) -> float:
        """CPU time of a request."""


@dataclass(slots=True)
class Allowance:
    """What the losses of one request may still take."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A task that waits for its owner's turn."""

    run: Callable[[LossChild], None]
    fail: Callable[[BaseException], None]


@dataclass(slots=True)
class _Owners:
    """Whose turn it is. All of it belongs to the lock of `LossProcesses`."""

    lines: dict[str, deque[_Waiting]] = field(default_factory=dict)
    """Waiting tasks, the owner first who has waited longest."""
    running: set[str] = field(default_factory=set)
    idle: dict[str, LossChild] = field(default_factory=dict)
    """Processes without a task, the one first that has had none for longest."""

    def next(self) -> tuple[str, _Waiting] | None:
        """Take the next task; None if there is none whose owner has no running one."""
        owner = next((each for each in self.lines if each not in self.running), None)
        if owner is None:
            return None
        line = self.lines.pop(owner)
        task = line.popleft()
        if line:
            # Behind the other owners.
            self.lines[owner] = line
        self.running.add(owner)
        return owner, task


class LossProcesses:
    """The processes of a head. Thread-safe. None starts before the first task."""

    def __init__(self, limits: Limits, nursery: Nursery | None = None) -> None:
        """Start nothing.

        Args:
            limits: what a loss may take.
            nursery: a nursery that is there already.
        """
        self.limits = limits
        self._nursery = nursery
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._owners = _Owners()
        self._is_closed = False

    def check_cost(
        self, owner: str, name: str, task: CostTask, allowed: Allowance
    ) -> "Future[None]":
        """Check the cost of a loss.

        The future raises InvalidRequest if it costs too much or does not fit the shapes, and
        LossEnded if the check was ended.
        """
        return self._submit(owner, name, task, allowed, lambda _: None)

    def compute(
        self, owner: str, name: str, task: LossTask, allowed: Allowance
    ) -> "Future[LossValues]":
        """Compute a loss of some data.

        The future raises InvalidRequest if an operation failed, and LossEnded if the loss was
        ended.
        """
        return self._submit(owner, name, task, allowed, TaskMemory.values)

    def _submit(
        self,
        owner: str,
        name: str,
        task: CostTask | LossTask,
        allowed: Allowance,
        read: Callable[[TaskMemory], T],
    ) -> "Future[T]":
        done = Future[T]()
        # It can't be cancelled: the thread that computes the task sets its result.
        done.set_running_or_notify_cancel()

        def run(child: LossChild) -> None:
            try:
                with TaskMemory(task) as memory:
                    self._run(name, child, memory, allowed)
                    result = read(memory)
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
                done.set_exception(error)
            else:
                done.set_result(result)

        with self._lock:
            if self._is_closed:
                done.set_exception(_stopping())
                return done
            line = self._owners.lines.setdefault(owner, deque())
            line.append(_Waiting(run, done.set_exception))
            self._start_turns()
        return done

    def _run(self, name: str, child: LossChild, memory: TaskMemory, allowed: Allowance) -> None:
        limits = TaskLimits(max(allowed.seconds, 0.001), max(allowed.cpu_seconds, 1.0))
        began = time.monotonic()
        try:
            used = child.run(name, memory, limits, self.limits.max_loss_bytes)
            allowed.cpu_seconds -= used
        finally:
            allowed.seconds -= time.monotonic() - began

    def _start_turns(self) -> None:
        """Start as many tasks as may run. Call it with the lock held."""
        while len(self._owners.running) < self.limits.max_loss_processes:
            turn = self._owners.next()
            if turn is None:
                return
            thread = threading.Thread(target=self._take_turn, args=turn, name="loss", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.exception("a thread for custom losses could not be started")
                owner, task = turn
                self._owners.running.discard(owner)
                task.fail(_cannot_start(error))

    def _take_turn(self, owner: str, task: _Waiting) -> None:
        child = None
        try:
            child = self._child_of(owner)
        except Exception as error:
            log.exception("a process for custom losses could not be started")
            task.fail(_cannot_start(error))
        else:
            task.run(child)
            if child.is_closed:
                # The owner's next loss need not wait for another one.
                child = self._replacement()
        finally:
            self._end_turn(owner, child)

    def _replacement(self) -> LossChild | None:
        try:
            return self._started()
        except Exception:
            log.exception("a process for custom losses could not be replaced")
            return None

    def _end_turn(self, owner: str, child: LossChild | None) -> None:
        with self._lock:
            self._owners.running.discard(owner)
            if child is not None and not self._is_closed:
                self._owners.idle[owner] = child
                child = None
            self._start_turns()
        if child is not None:
            child.close()

    def _child_of(self, owner: str) -> LossChild:
        """Return the owner's process; another owner's idle one makes room for it."""
        with self._lock:
            idle = self._owners.idle
            if (child := idle.pop(owner, None)) is not None and child.is_alive:
                return child
            surplus = [] if child is None else [child]
            most = self.limits.max_loss_processes - len(self._owners.running)
            while len(idle) > most:
                surplus.append(idle.pop(next(iter(idle))))
        for each in surplus:
            each.close()
        return self._started()

    def _started(self) -> LossChild:
        """Start a process, and a nursery if there is none.

        Raises:
            NurseryLost: two nurseries have ended, or this object is closed.
            OSError: the machine can't start it.
        """
        threads, most = _num_threads(self.limits), self.limits.max_loss_bytes
        with self._starting:
            if self._is_closed:
                # The next nursery would have nobody who ends it.
                raise NurseryLost("this session head is stopping")
            if self._nursery is not None:
                try:
                    return self._nursery.start(threads, most)
                except NurseryLost:
                    log.warning("the nursery of custom losses has ended; another one is started")
                    self._nursery.close()
            self._nursery = Nursery.started()
            return self._nursery.start(threads, most)

    def close(self) -> None:
        """End all processes; tasks that wait fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [task for line in self._owners.lines.values() for task in line]
            self._owners.lines.clear()
            self._owners.idle.clear()
        for task in waiting:
            task.fail(_stopping())
        with self._starting:
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None


def _num_threads(limits: Limits) -> int:
    """Return the threads of a process: those of the head, but no more than both limits allow.

    With more, a loss within the limit of time could exceed that of CPU time, on large hosts only.
    """
    allowed = int(limits.max_loss_cpu_seconds // limits.max_loss_seconds)
    return max(1, min(torch.get_num_threads(), allowed))


def _stopping() -> Unavailable:
    return Unavailable("this session head is stopping; send the request again")


def _cannot_start(error: Exception) -> Unavailable:
    return Unavailable(
        f"no process for custom losses could be started ({error}); ask an administrator to look at"
        " the log of the session head, then send the request again"
    )
