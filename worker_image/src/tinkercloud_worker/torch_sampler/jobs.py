"""Requests that the torch sampler is processing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

from torch import Tensor

from tinkercloud_protocol.requests.tensors import SampledSequence
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, SamplingResult
from tinkercloud_worker.engine.turns.fair_queue import Accounts
from tinkercloud_worker.engine.turns.usage_counts import Payer
from tinkercloud_worker.lora.segments import ActiveWeights
from tinkercloud_worker.torch_sampler.decode.decoding import DecodingBatch, RunningSequence
from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues, KvBudget, PrefillCache
from tinkercloud_worker.torch_sampler.decode.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.scoring import PromptScorer
from tinkercloud_worker.torch_sampler.versions import Version
from tinkercloud_worker.vision.prepared import PreparedPrompt
from tinkercloud_worker.vision.spans import around


@dataclass(slots=True, eq=False)
class Job:
    """One request and its progress."""

    version: Version
    """The version of weights, acquired until the job ends."""
    request: SamplingRequest
    resolve: Callable[[SamplingResult | Exception], None]
    is_cancelled: Callable[[], bool]
    weights: ActiveWeights | None = None
    batch: DecodingBatch | UnbatchedDecoding | None = None
    cache: PrefillCache | None = None
    scorer: PromptScorer | None = None
    prefilled: int = 0
    """Prompt tokens that are prefilled."""
    reused: int = 0
    """Prefilled tokens that were reused from an earlier prompt."""
    key_values: KeyValues = ()
    """Keys and values of the prompt, after its prefill."""
    last_logits: Tensor | None = None
    """Logits [V] after the prompt's last token, after its prefill."""
    started: int = 0
    """Number of samples that have joined the batch."""
    running: list[RunningSequence] = field(default_factory=list)
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    timed: int = 0
    """Computed prompt tokens that `tokens_of_step` has returned."""

    @property
    def owner(self) -> str:
        """Who sent the request."""
        return self.request.owner

    @property
    def prompt(self) -> PreparedPrompt:
        """Its prompt, with images."""
        return PreparedPrompt(self.request.prompt, self.request.images)

    def next_chunk(self, most: int) -> int:
        """Return the number of prompt tokens to prefill next.

        Args:
            most: their maximum number; the last images of a chunk may exceed it.
        """
        stop = min(self.prefilled + most, len(self.request.prompt))
        block = around(self.request.images, stop)
        return (stop if block is None else block.stop) - self.prefilled

    @property
    def failure(self) -> Exception | None:
        """The error of a sequence that could not be continued."""
        return next((each.error for each in self.running if each.error is not None), None)

    @property
    def runs_apart(self) -> bool:
        """Whether its sequences can't share a batch with those of other weights."""
        return self.is_full_model or self.version.is_apart

    @property
    def is_full_model(self) -> bool:
        """Whether its weights, if loaded, are those of a full model."""
        return self.weights is not None and self.weights.lora_scale is None

    @property
    def is_waiting(self) -> bool:
        """Whether its prompt is kept for samples that have not joined the batch."""
        return self.batch is not None and self.started < self.request.num_samples

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt is prefilled, so that samples may join."""
        return self.last_logits is not None


def tokens_of_step(jobs: Iterable[Job]) -> Counter[Payer]:
    """Return the prompt tokens computed since the last call, and a token for each running sample.

    Args:
        jobs: the jobs of the step.
    """
    tokens = Counter[Payer]()
    for job in jobs:
        prompt_tokens = max(job.prefilled - job.reused - job.timed, 0)
        job.timed += prompt_tokens
        tokens[job.request.payer] += prompt_tokens + len(job.running)
    return tokens


def waiting(jobs: Iterable[Job]) -> KvBudget:
    """Return the number of prompts kept for samples that have not joined, and their tokens."""
    lengths = [len(job.request.prompt) for job in jobs if job.is_waiting]
    return KvBudget(len(lengths), sum(lengths))


def in_turn(accounts: Accounts, jobs: Iterable[tuple[Job, int]]) -> Iterator[Job]:
    """Yield jobs, each as often as given, in the order of their owners' turns.

    Those of one owner come in the order given.
    """
    lines: dict[str, list[Iterable[Job]]] = {}
    for job, times in jobs:
        lines.setdefault(job.owner, []).append(repeat(job, times))
    all_lines = {owner: chain.from_iterable(line) for owner, line in lines.items()}
    return (job for _, job in accounts.in_turn(all_lines))
