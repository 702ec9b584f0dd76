"""Prefills prompts: alone in chunks, or several in one pass.

Shape legend: B prompts, T new positions, R rows, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud_worker.lora.segments import single_segment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.decoding import DecodingBatch, segments_of
from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues
from tinkercloud_worker.torch_sampler.decode.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.jobs import Job
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore
from tinkercloud_worker.torch_sampler.scoring import PromptScorer

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at a time for scoring."""


class Prefill:
    """Computes prompts from the longest prefix of each that is cached, and caches them."""

    def __init__(self, base: TorchBaseModel, prefixes: PrefixStore, *, shares_passes: bool) -> None:
        """Create it; `shares_passes` is set where the overhead of launches dominates."""
        self._base = base
        self._prefixes = prefixes
        self._shares_passes = shares_passes and base.takes_packs

    def can_share(self, job: Job) -> bool:
        """Whether a prompt is prefilled in one pass with others.

        A shared pass can't use the weights of full models, and starts at the beginning of each
        prompt.
        """
        return (
            self._shares_passes
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
