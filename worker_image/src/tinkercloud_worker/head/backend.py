"""The trainer, sampler, engine thread and store of a head."""

import os
from dataclasses import dataclass, field

from tinkercloud_protocol.heads.launch import HeadConfig
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.losses.loss_limits import LossLimits
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.engine.prompt_images import TEXT_ONLY, PromptImages
from tinkercloud_worker.engine.run_curves import Curves
from tinkercloud_worker.engine.sampling.kept_samples import KeptSamples
from tinkercloud_worker.engine.sampling.sampler_interface import EngineScaler, Sampler
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.engine.turns.usage_counts import UsageMeter
from tinkercloud_worker.head.wire.image_work import ImageWork
from tinkercloud_worker.head.wire.request_times import SpanRecorder
from tinkercloud_worker.head.wire.token_limits import TokenLimits


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
    curves: Curves = field(default_factory=Curves)
    """What the optimizer steps of its models report."""
    kept_samples: KeptSamples = field(default_factory=KeptSamples)
    """Samples of the runs whose owners keep the text of some."""
    text: ChatText | None = None
    """Renders and decodes text; None if the head serves tokens only."""
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    """When requests were accepted, started and finished."""
    engine_scaler: EngineScaler | None = None
    """Says how many engines the sampler needs; None if their number is fixed."""
    token_limits: TokenLimits = field(default_factory=TokenLimits)
    """Limits the tokens per minute of owners."""
    images: PromptImages = TEXT_ONLY
    """How the served model reads images."""
    image_work: ImageWork = field(default_factory=ImageWork)
    """Decodes them."""
    losses: LossProcesses = field(default_factory=lambda: LossProcesses(LossLimits()))
    """Compute the losses that clients upload."""

    def set_owner_limits(self, limits: OwnerLimits) -> None:
        """Apply the current limits of an owner, also to requests that wait."""
        self.token_limits.set(limits)
        if limits.weight is not None:
            self.thread.weights[limits.owner] = limits.weight


def random_seed() -> int:
    """Return a random 63-bit seed, for requests that have none."""
    return int.from_bytes(os.urandom(8), "little") >> 1
