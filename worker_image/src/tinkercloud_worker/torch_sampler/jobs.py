"""Requests on their way through the torch sampler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from tinkercloud_protocol.tensors import SampledSequence
from tinkercloud_worker.engine.sampler import SamplingRequest, SamplingResult
from tinkercloud_worker.lora.segments import ActiveWeights
from tinkercloud_worker.torch_sampler.cache import KeyValues, KvBudget, PrefillCache
from tinkercloud_worker.torch_sampler.decoding import DecodingBatch, Running
from tinkercloud_worker.torch_sampler.scoring import PromptScorer
from tinkercloud_worker.torch_sampler.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.versions import Version


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through."""

    version: Version
    """Acquired; released when the job is over."""
    request: SamplingRequest
    resolve: Callable[[SamplingResult | Exception], None]
    is_cancelled: Callable[[], bool]
    weights: ActiveWeights | None = None
    batch: DecodingBatch | UnbatchedDecoding | None = None
    cache: PrefillCache | None = None
    scorer: PromptScorer | None = None
    read: int = 0
    """Prompt tokens whose keys and values are known."""
    reused: int = 0
    """How many of them came from an earlier prompt."""
    key_values: KeyValues = ()
    """Of the prompt, once it is read."""
    last_logits: Tensor | None = None
    """Logits [V] after the prompt's last token, once it is read."""
    started: int = 0
    """Samples that have joined the batch."""
    running: list[Running] = field(default_factory=list)
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def is_whole_model(self) -> bool:
        """Whether its weights, once they are known, are a whole model's."""
        return self.weights is not None and self.weights.lora_scale is None

    @property
    def is_waiting(self) -> bool:
        """Whether its prompt is held for samples that have not joined."""
        return self.batch is not None and self.started < self.request.num_samples

    @property
    def is_read(self) -> bool:
        """Whether its prompt is read, so that samples may join."""
        return self.last_logits is not None


def waiting(jobs: Iterable[Job]) -> KvBudget:
    """Return how many prompts are held for samples that have not joined, and their tokens."""
    lengths = [len(job.request.prompt) for job in jobs if job.is_waiting]
    return KvBudget(len(lengths), sum(lengths))
