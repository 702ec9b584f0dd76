"""Everything a head computes and stores with, in one place."""

import os
from dataclasses import dataclass

from tinkercloud_protocol.launch import HeadConfig
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.engine.sampler import Sampler
from tinkercloud_worker.engine.thread import EngineThread
from tinkercloud_worker.engine.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Backend:
    """What `__main__` assembles and the head is given."""

    config: HeadConfig
    trainer: Trainer
    sampler: Sampler
    thread: EngineThread
    store: CheckpointStore
    end_tokens: frozenset[int]
    """Tokens that end a text of the served model."""
    base_fingerprint: str | None = None
    """Of the served model (`fingerprint`); None where neither head nor trainer has its files."""


def random_seed() -> int:
    """Return a seed nobody asked for, 63 bits."""
    return int.from_bytes(os.urandom(8), "little") >> 1
