"""The batches of running sequences, and whether memory suffices for more."""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.config import Capacity
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.decode.decoding import (
    DecodingBatch,
    RunningSequence,
    TokenSampler,
)
from tinkercloud_worker.torch_sampler.decode.decoding_check import check_decoding
from tinkercloud_worker.torch_sampler.decode.kv_cache import KvBudget
from tinkercloud_worker.torch_sampler.decode.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.jobs import Job, waiting

log = logging.getLogger(__name__)

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
        """Return the positions that running sequences may occupy beside waiting prompts."""
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
