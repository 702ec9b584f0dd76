"""What a step of the sampler computes: prompts, and the batches of running sequences.

Shape legend: B prompts, T new positions, R rows, D hidden size, V vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tinkercloud_worker.lora.segments import single_segment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.config import Capacity
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.decode.decoding import (
    DecodingBatch,
    RunningSequence,
    TokenSampler,
    segments_of,
)
from tinkercloud_worker.torch_sampler.decode.decoding_check import check_decoding
from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues, KvBudget
from tinkercloud_worker.torch_sampler.decode.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.jobs import Job, waiting
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore
from tinkercloud_worker.torch_sampler.scoring import PromptScorer

log = logging.getLogger(__name__)

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at a time for scoring."""
_KEPT_SHARE = 4
"""Divisor of the KV cache budget that gives the share of the prefix cache. If steps are captured,
the same share stays allocated without sequences, so that captured graphs remain valid."""

Starting: TypeAlias = tuple[Job, RunningSequence]
"""A sample that starts to run, and its job."""


class Batches:
    """Each kind of weights that can't share a step has a batch; some sequences run one by one."""

    def __init__(
        self,
        base: TorchBaseModel,
        token_sampler: TokenSampler,
        config: Capacity,
        graph_capturer: GraphCapturer | None,
    ) -> None:
        """Create it without sequences; the arguments are those of `TorchSampler`."""
        self._base, self._token_sampler = base, token_sampler
        self._config, self._graph_capturer = config, graph_capturer
        decoding = check_decoding(base, token_sampler)
        self.slotted = decoding.slotted
        """Maximum positions of a sequence in a slot."""
        self.unbatched = UnbatchedDecoding(base, token_sampler, decoding.new_cache)
        """The sequences that run one by one."""
        self._by_weights: dict[int | None, DecodingBatch] = {}
        self.kept = KvBudget(config.max_running_sequences, config.max_cached_tokens // _KEPT_SHARE)
        """The budget of prompts that wait for their samples to join."""

    def clear(self) -> None:
        """Free the memory of all batches, which must have no sequences."""
        self._by_weights.clear()

    def leave(self, job: Job, jobs: Sequence[Job]) -> None:
        """Remove the running sequences of a job that has left the jobs."""
        if job.batch is not None:
            job.batch.abort(job.running)
        for key, batch in list(self._by_weights.items()):
            if key is not None and not any(other.batch is batch for other in jobs):
                del self._by_weights[key]

    def of(self, job: Job) -> DecodingBatch | UnbatchedDecoding:
        """Return the batch that a job's sequences will join."""
        if job.request.num_positions > self.slotted:
            return self.unbatched
        key = id(job.weights) if job.runs_apart else None
        if key not in self._by_weights:
            # Only steps of the base and of usual adapters are captured.
            self._by_weights[key] = (
                DecodingBatch(self._base, self._token_sampler)
                if job.runs_apart or self._graph_capturer is None
                else DecodingBatch(
                    self._base,
                    self._token_sampler,
                    graph_capturer=self._graph_capturer,
                    kept=self.kept,
                )
            )
        return self._by_weights[key]

    def step(self) -> None:
        """Run one decoding step of each batch; if it fails, of each sequence by itself."""
        for batch in self._all:
            if batch.sequences:
                try:
                    batch.step()
                except Exception:
                    log.exception("a decoding step failed; its sequences run one by one")
                    batch.step_each()

    def room(self, jobs: Sequence[Job]) -> int:
        """Return the positions that running sequences may occupy, apart from waiting prompts."""
        # A prompt longer than the budget of waiting prompts uses memory of running sequences.
        excess = max(waiting(jobs).tokens - self.kept.tokens, 0)
        return self._config.max_cached_tokens - excess

    def can_start(self, starting: Sequence[Starting], jobs: Sequence[Job], room: int) -> bool:
        """Whether sequences may join. A single one always may, or it would never run.

        An owner without running sequences may have one beyond the maximum number.
        """
        count = self.num_running + len(starting)
        # A sequence of one token needs no slot.
        joining = [pair for pair in starting if pair[1].request.max_tokens > 1]
        return count == 1 or (
            (count <= self._config.max_running_sequences or _is_first(starting, jobs))
            and self._cache_tokens_with(joining) <= room
        )

    def can_prefill(self, job: Job, jobs: Sequence[Job]) -> bool:
        """Whether memory suffices to prefill a prompt and keep it until its samples join."""
        held, length = waiting(jobs), len(job.request.prompt)
        if held.sequences:
            # An owner without waiting prompts may have one beyond the maximum number.
            has_place = held.sequences < self.kept.sequences or not any(
                other.is_waiting for other in jobs if other.owner == job.owner
            )
            return has_place and held.tokens + length <= self.kept.tokens
        excess = max(length - self.kept.tokens, 0)
        room = self._config.max_cached_tokens - excess
        return not self.num_running or self._cache_tokens_with([]) <= room

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return sum(len(batch.sequences) for batch in self._all)

    @property
    def _all(self) -> list[DecodingBatch | UnbatchedDecoding]:
        return [*self._by_weights.values(), self.unbatched]

    def _cache_tokens_with(self, starting: Sequence[Starting]) -> int:
        """Return the positions that running and joining sequences will occupy."""
        return sum(
            batch.cache_tokens_with([sequence for job, sequence in starting if job.batch is batch])
            for batch in self._all
        )


def _is_first(starting: Sequence[Starting], jobs: Sequence[Job]) -> bool:
    """Whether the last of these sequences is the only one of its owner."""
    *others, (last, _) = starting
    return not any(job.owner == last.owner for job, _ in others) and not any(
        job.running for job in jobs if job.owner == last.owner
    )


class Prefill:
    """Computes prompts from the longest prefix of each that is cached, and caches them."""

    def __init__(self, base: TorchBaseModel, prefixes: PrefixStore) -> None:
        """Create it for a model and the store of its prefixes."""
        self._base = base
        self._prefixes = prefixes

    def can_share(self, job: Job) -> bool:
        """Whether a prompt is prefilled in one pass with others.

        A shared pass can't use the weights of full models, and starts at the beginning of each
        prompt.
        """
        return (
            self._base.takes_packs
            and isinstance(job.batch, DecodingBatch)
            and not job.runs_apart
            and job.prefilled == 0
        )

    def begin(self, job: Job, batch: DecodingBatch | UnbatchedDecoding) -> None:
        """Start from the cached prefix of a prompt, whose sequences will join this batch."""
        job.scorer = PromptScorer(job.request)
        first_needed = job.scorer.first_needed
        reusable = len(job.request.prompt) - 1
        if first_needed is not None:
            reusable = min(reusable, first_needed)
        job.batch = batch
        prefix: KeyValues = ()
        if isinstance(batch, DecodingBatch):
            job.reused, prefix = self._prefixes.find(job.version, job.prompt, reusable)
        job.prefilled = job.reused
        job.cache = batch.new_prefill_cache(len(job.request.prompt), prefix)

    def run_chunk(self, job: Job, count: int) -> None:
        """Prefill the next tokens of a prompt."""
        assert job.cache is not None and job.batch is not None  # noqa: S101, PT018 - admitted
        prompt, start = job.request.prompt, job.prefilled
        job.prefilled += count
        chunk = prompt[start : job.prefilled].tolist()
        hidden_TD = job.batch.prefill(job.cache, chunk, start, job.weights, job.request.images)
        self._score(job, start, hidden_TD)
        if job.prefilled == len(prompt):
            logits_1V = self._base.logits(hidden_TD[-1:], single_segment(job.weights))
            self._finish(job, job.cache.key_values(), logits_1V[0])

    def run_together(self, jobs: Sequence[Job]) -> None:
        """Prefill several full prompts in one pass."""
        batch = jobs[0].batch
        assert isinstance(batch, DecodingBatch)  # noqa: S101 - admitted, and slotted
        weights = [job.weights for job in jobs]
        read = batch.prefill_batch([job.prompt for job in jobs], weights)
        last_BD = torch.stack([hidden_TD[-1] for hidden_TD, _ in read])
        logits_BV = self._base.logits(last_BD, segments_of(weights))
        for job, (hidden_TD, key_values), logits_V in zip(jobs, read, logits_BV, strict=True):
            job.prefilled = len(job.request.prompt)
            self._score(job, 0, hidden_TD)
            self._finish(job, key_values, logits_V)

    def _finish(self, job: Job, key_values: KeyValues, last_logits_V: Tensor) -> None:
        job.key_values, job.last_logits = key_values, last_logits_V
        if key_values:
            self._prefixes.add(job.version, job.prompt, key_values)

    def _score(self, job: Job, start: int, hidden_TD: Tensor) -> None:
        needed = job.scorer.first_needed if job.scorer is not None else None
        if job.scorer is None or needed is None:
            return
        for row in range(max(needed - start, 0), len(hidden_TD), _SCORED_ROWS):
            rows_RD = hidden_TD[row : row + _SCORED_ROWS]
            job.scorer.add(start + row, self._base.logits(rows_RD, single_segment(job.weights)))
