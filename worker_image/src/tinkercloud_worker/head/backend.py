"""The trainer, sampler, engine thread and store of a head."""

import os
from dataclasses import dataclass, field

from tinkercloud_protocol.launch import HeadConfig
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.engine.sampler import Sampler
from tinkercloud_worker.engine.thread import EngineThread
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.engine.usage import UsageMeter
from tinkercloud_worker.head.timeline import SpanRecorder


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a head that `run_head` assembles."""

    config: HeadConfig
    trainer: Trainer
    sampler: Sampler
    thread: EngineThread
    store: CheckpointStore
    end_tokens: frozenset[int]
    """Tokens that end a text of the served model."""
    base_fingerprint: str | None = None
    """Fingerprint of the served model (`model.fingerprint`); None where neither the head nor the
    trainer has its files."""
    usage: UsageMeter = field(default_factory=UsageMeter)
    """Counts what the head computes."""
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    """When requests were accepted, started and finished."""


def random_seed() -> int:
    """Return a random 63-bit seed, for requests that have none."""
    return int.from_bytes(os.urandom(8), "little") >> 1
