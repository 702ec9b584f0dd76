"""Objects for the ranks of a group: real collectives, and ways to fail.

Apart from those that train, whose imports take a rank longer than all that these do.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from tinkercloud_protocol.errors import InvalidRequest


class Recorder:
    """Adds up numbers over all ranks, and remembers the order in which it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def add(self, number: int) -> float:
        """Return the sum over the ranks of number + rank."""
        self.asked.append(number)
        total = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(total)
        return float(total)

    def history(self) -> list[int]:
        """Return what `add` was asked, in order."""
        return self.asked

    def salvage(self) -> list[int]:
        """Return what `add` and `note` were asked, and the rank that says so."""
        return [*self.asked, dist.get_rank()]

    def note(self, number: int, *deaths: int) -> int:
        """Remember a number, without the other ranks; be killed before at some of them."""
        if dist.get_rank() in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked.append(number)
        return number

    def note_unless_failing(self, number: int, *failures: int) -> int:
        """Remember a number, without the other ranks; raise before at some of them."""
        if dist.get_rank() in failures:
            raise ArithmeticError("no room for it")
        self.asked.append(number)
        return number

    def hang_unless_killed(self, rank: int) -> None:
        """Be killed at one rank, while the others never come back."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def patience(self) -> float:
        """Return for how many seconds a key of the store at which the ranks met is waited for."""
        store = dist.distributed_c10d._get_default_store()
        return float(store.timeout.total_seconds())  # type: ignore[attr-defined] # untyped, public

    def process(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def die_at(self, rank: int) -> None:
        """Be killed at one rank, while the others wait for it in a collective."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def fail_at(self, rank: int) -> None:
        """Raise at one rank, while the others wait for it in a collective."""
        if dist.get_rank() == rank:
            raise ArithmeticError("no such number")
        dist.barrier()

    def refuse(self) -> None:
        """Refuse at every rank."""
        raise InvalidRequest("number: must be even")

    def refuse_at(self, rank: int) -> None:
        """Refuse at one rank only."""
        if dist.get_rank() == rank:
            raise InvalidRequest("number: must be even")


def never_ready() -> Recorder:
    """Take for ever to load."""
    time.sleep(3600)
    return Recorder()


def cannot_load() -> Recorder:
    """Fail to load."""
    raise FileNotFoundError("model.safetensors")
