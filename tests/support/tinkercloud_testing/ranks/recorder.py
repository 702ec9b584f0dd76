"""Objects for the ranks of a group: real collectives, and failures on request.

They are separate from the trainers, whose imports take longer than these tests.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from tinkercloud_protocol.wire.errors import InvalidRequest


class Recorder:
    """Sums numbers over all ranks, and records the order of its calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def add(self, number: int) -> float:
        """Return the sum of number + rank over all ranks."""
        self.asked.append(number)
        total = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(total)
        return float(total)

    def history(self) -> list[int]:
        """Return the arguments of `add`, in order."""
        return self.asked

    def salvage(self) -> list[int]:
        """Return the arguments of `add` and `note`, and this rank."""
        return [*self.asked, dist.get_rank()]

    def note(self, number: int, *deaths: int) -> int:
        """Record a number on each rank, without communication; some ranks are killed first."""
        if dist.get_rank() in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked.append(number)
        return number

    def note_unless_failing(self, number: int, *failures: int) -> int:
        """Record a number on each rank, without communication; some ranks raise first."""
        if dist.get_rank() in failures:
            raise ArithmeticError("no room for it")
        self.asked.append(number)
        return number

    def hang_unless_killed(self, rank: int) -> None:
        """Kill one rank, while the others never return."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def patience(self) -> float:
        """Return the timeout in seconds of the store of the group."""
        store = dist.distributed_c10d._get_default_store()
        return float(store.timeout.total_seconds())  # type: ignore[attr-defined] # untyped, public

    def process(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def die_at(self, rank: int) -> None:
        """Kill one rank, while the others wait for it in a collective."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def fail_at(self, rank: int) -> None:
        """Raise on one rank, while the others wait for it in a collective."""
        if dist.get_rank() == rank:
            raise ArithmeticError("no such number")
        dist.barrier()

    def refuse(self) -> None:
        """Raise a user error on every rank."""
        raise InvalidRequest("number: must be even")

    def refuse_at(self, rank: int) -> None:
        """Raise a user error on one rank."""
        if dist.get_rank() == rank:
            raise InvalidRequest("number: must be even")


def never_ready() -> Recorder:
    """Never finish loading."""
    time.sleep(3600)
    return Recorder()


def cannot_load() -> Recorder:
    """Fail to load."""
    raise FileNotFoundError("model.safetensors")
