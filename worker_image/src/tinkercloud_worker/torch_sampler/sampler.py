"""The torch sampler: requests in, results out, computing on the engine thread.

Two threads meet here. Coroutines on the event loop hand requests over and wait; `step`, on the
engine thread, admits them, reads their prompts a chunk at a time, lets their samples join the
running batch as slots come free, and hands results back. Everything after the inbox belongs to
the engine thread alone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from tinkercloud_protocol.errors import InvalidRequest, WireError
from tinkercloud_worker.engine.sampler import Sampler, SamplingRequest, SamplingResult
from tinkercloud_worker.engine.thread import Background
from tinkercloud_worker.engine.trainer import Publication, WeightsSnapshot
from tinkercloud_worker.lora.segments import route_all
from tinkercloud_worker.model.base_model import BaseModel
from tinkercloud_worker.torch_sampler.cache import KeyValues, KvBudget
from tinkercloud_worker.torch_sampler.capacity import Capacity
from tinkercloud_worker.torch_sampler.decoding import (
    DecodingBatch,
    Running,
    TokenSampler,
    routes_of,
)
from tinkercloud_worker.torch_sampler.decoding_check import check_decoding
from tinkercloud_worker.torch_sampler.graphs import Recorder
from tinkercloud_worker.torch_sampler.jobs import Job, waiting
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore, common_length
from tinkercloud_worker.torch_sampler.scoring import PromptScorer
from tinkercloud_worker.torch_sampler.unbatched import UnbatchedDecoding
from tinkercloud_worker.torch_sampler.versions import Version, Versions

log = logging.getLogger(__name__)

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at a time."""
_WORTH_WAITING_FOR = 256
"""Tokens that a prompt has in common with another that is being read: fewer are read twice."""
_KEPT_SHARE = 4
"""One part in so many of the key-value budget is for prompts read lately. Where steps are recorded,
as much stays allocated without sequences, so that recordings stay valid."""


class TorchSampler(Sampler, Background):
    """See `engine.sampler.Sampler` and `engine.thread.Background`, whose contracts it fulfils."""

    def __init__(
        self,
        base: BaseModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Capacity,
        *,
        versions: Versions,
        wake: Callable[[], None],
        recorder: Recorder | None = None,
    ) -> None:
        """Make a sampler that knows no version yet.

        Args:
            base: the model.
            tokenizer: of the model.
            config: what it may take at a time.
            versions: where published weights are kept.
            wake: called when there is work; may be called from any thread.
            recorder: of decoding steps; None: steps are not recorded.
        """
        self._base = base
        self._config = config
        self._versions = versions
        self._wake = wake
        self._recorder = recorder
        self._token_sampler = TokenSampler(tokenizer, config.sampled_logprobs)
        decoding = check_decoding(base, self._token_sampler)
        self._slotted = decoding.slotted
        self._unbatched = UnbatchedDecoding(base, self._token_sampler, decoding.new_cache)
        kept_tokens = config.max_cached_tokens // _KEPT_SHARE
        self._prefixes = PrefixStore(kept_tokens)
        self._kept = KvBudget(config.max_running_sequences, kept_tokens)
        self._inbox: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._batches: dict[int | None, DecodingBatch] = {}

    @override
    async def publish(self, version: str, weights: Publication | None) -> None:
        """Raise OSError if memory is short and the scratch folder can't hold the weights."""
        if version in self._versions:
            return
        # What ranks keep is for inference servers.
        assert weights is None or isinstance(weights, WeightsSnapshot)  # noqa: S101 - see above
        prepared = await asyncio.to_thread(self._versions.prepare, weights)
        self._versions.add(version, prepared)
        try:
            await asyncio.to_thread(self._versions.spill)
        except BaseException:
            await self.retire(version)
            raise

    @override
    def release_caches(self) -> None:
        self._prefixes.clear()
        # Recorded steps are of the places that a batch has.
        if self._recorder is None and not self._jobs and not self._num_running:
            self._batches.clear()

    @override
    async def retire(self, version: str) -> None:
        retired = self._versions.pop(version)
        if retired is not None:
            await asyncio.to_thread(self._release, retired)

    @override
    async def export(self, version: str) -> WeightsSnapshot | None:
        exported = self._versions.acquire(version)

        def export() -> WeightsSnapshot | None:
            try:
                return self._versions.export(exported)
            finally:
                self._release(exported)

        return await asyncio.to_thread(export)

    def _release(self, version: Version) -> None:
        if self._versions.release(version):
            self._prefixes.forget(version)

    @override
    async def sample(self, version: str, request: SamplingRequest) -> SamplingResult:
        if request.num_positions > self._config.max_cached_tokens:
            raise InvalidRequest(
                f"prompt and max_tokens come to {request.num_positions + 1} tokens, of which all"
                f" but the last are kept in memory: this server keeps"
                f" {self._config.max_cached_tokens}; lower max_tokens"
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[SamplingResult] = loop.create_future()

        def resolve(result: SamplingResult | Exception) -> None:
            loop.call_soon_threadsafe(_settle, done, result)

        acquired = self._versions.acquire(version)
        self._inbox.append(Job(acquired, request, resolve, done.cancelled))
        self._wake()
        return await done

    @override
    async def close(self) -> None:
        """Everything is in this process."""

    @override
    def has_work(self) -> bool:
        return bool(self._inbox or self._jobs)

    @override
    def step(self) -> None:
        """Read a chunk of prompts, then draw one token everywhere."""
        while self._inbox:
            self._jobs.append(self._inbox.popleft())
        self._drop_cancelled()
        self._read_prompts()
        self._start_samples()
        for batch in self._all_batches:
            if batch.sequences:
                members = [job for job in self._jobs if job.batch is batch]
                self._guarded(members, lambda batch=batch: batch.step())  # type: ignore[misc]
        for job in list(self._jobs):
            self._collect(job)

    def _guarded(self, jobs: list[Job], work: Callable[[], object]) -> None:
        """Do some work; if it fails, only the requests that it was for fail."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, WireError):
                log.exception("sampling failed")
            for job in jobs:
                self._finish(job, error)

    def _read_prompts(self) -> None:
        """Read prompts, first come first served, until a chunk's worth of tokens is read."""
        left = self._config.prefill_chunk_tokens
        together: list[Job] = []
        is_full = False
        for job in [job for job in self._jobs if not job.is_read]:
            if left <= 0:
                break
            if self._is_better_read_later(job, together):
                continue
            # Nobody overtakes who finds no room, but those go on whose prompt is half read.
            is_full = is_full or not (job.batch is not None or self._has_room_to_read(job))
            if is_full and job.batch is None:
                continue
            self._guarded([job], lambda job=job: self._admit(job))  # type: ignore[misc]
            if job not in self._jobs:
                continue
            count = len(job.request.prompt) - job.read
            if job.batch is not self._unbatched:
                count = min(left, count)
            if self._can_be_packed(job) and count == len(job.request.prompt):
                together.append(job)
            else:
                self._guarded([job], lambda job=job, count=count: self._read(job, count))  # type: ignore[misc]
            left -= count
        if together:
            self._guarded(together, lambda: self._read_together(together))

    def _can_be_packed(self, job: Job) -> bool:
        """Whether a prompt is read in one pass with others: where launching a pass is what costs.

        A pass may have one whole model's weights only, and begins at each prompt's beginning.
        """
        return (
            self._recorder is not None
            and job.batch is not self._unbatched
            and self._base.takes_packs
            and not job.is_whole_model
            and job.read == 0
        )

    @staticmethod
    def _is_better_read_later(job: Job, others: Sequence[Job]) -> bool:
        """Whether much of a prompt is being read already, and can be taken from there."""
        prompt = job.request.prompt
        return job.batch is None and any(
            other.version is job.version
            and common_length(other.request.prompt, prompt) >= _WORTH_WAITING_FOR
            for other in others
        )

    def _read(self, job: Job, count: int) -> None:
        """Read the next tokens of a prompt."""
        assert job.cache is not None and job.batch is not None  # noqa: S101, PT018 - admitted
        prompt, start = job.request.prompt, job.read
        job.read += count
        chunk = prompt[start : job.read].tolist()
        hidden_TD = job.batch.prefill(job.cache, chunk, start, job.weights)
        self._score(job, start, hidden_TD)
        if job.read == len(prompt):
            logits_1V = self._base.logits(hidden_TD[-1:], route_all(job.weights))
            self._end_reading(job, job.cache.key_values(), logits_1V[0])

    def _read_together(self, jobs: Sequence[Job]) -> None:
        """Read whole prompts in one pass."""
        batch = jobs[0].batch
        assert isinstance(batch, DecodingBatch)  # noqa: S101 - they are admitted, and can be packed
        weights = [job.weights for job in jobs]
        read = batch.prefill_together([job.request.prompt.tolist() for job in jobs], weights)
        last_BD = torch.stack([hidden_TD[-1] for hidden_TD, _ in read])
        logits_BV = self._base.logits(last_BD, routes_of(weights))
        for job, (hidden_TD, key_values), logits_V in zip(jobs, read, logits_BV, strict=True):
            job.read = len(job.request.prompt)
            self._score(job, 0, hidden_TD)
            self._end_reading(job, key_values, logits_V)

    def _end_reading(self, job: Job, key_values: KeyValues, last_logits_V: Tensor) -> None:
        job.key_values, job.last_logits = key_values, last_logits_V
        if key_values:
            self._prefixes.add(job.version, job.request.prompt, key_values)

    def _admit(self, job: Job) -> None:
        """Begin a prompt with what is cached of it, unless that was done before."""
        if job.batch is not None:
            return
        job.weights = self._versions.weights(job.version)
        job.scorer = PromptScorer(job.request)
        first_needed = job.scorer.first_needed
        reusable = len(job.request.prompt) - 1
        if first_needed is not None:
            reusable = min(reusable, first_needed)
        job.batch = self._batch_for(job)
        prefix: KeyValues = ()
        if job.batch is not self._unbatched:
            job.reused, prefix = self._prefixes.find(job.version, job.request.prompt, reusable)
        job.read = job.reused
        job.cache = job.batch.new_prefill_cache(len(job.request.prompt), prefix)

    def _batch_for(self, job: Job) -> DecodingBatch | UnbatchedDecoding:
        """Return the batch that a job's sequences are to join."""
        if job.request.num_positions > self._slotted:
            return self._unbatched
        key = id(job.weights) if job.is_whole_model else None
        if key not in self._batches:
            # Recorded steps are the base's and adapters'; whole models come and go.
            self._batches[key] = (
                DecodingBatch(self._base, self._token_sampler)
                if job.is_whole_model or self._recorder is None
                else DecodingBatch(
                    self._base, self._token_sampler, recorder=self._recorder, kept=self._kept
                )
            )
        return self._batches[key]

    def _score(self, job: Job, start: int, hidden_TD: Tensor) -> None:
        needed = job.scorer.first_needed if job.scorer is not None else None
        if job.scorer is None or needed is None:
            return
        for row in range(max(needed - start, 0), len(hidden_TD), _SCORED_ROWS):
            rows_RD = hidden_TD[row : row + _SCORED_ROWS]
            job.scorer.add(start + row, self._base.logits(rows_RD, route_all(job.weights)))

    def _start_samples(self) -> None:
        """Let samples of prompts that are read join, first come first served, while there is room.

        Samples do not overtake one that finds none, or short ones could keep a long one waiting.
        """
        starting: list[tuple[Job, Running]] = []
        # A prompt that is longer than what is kept for those that wait has some of the other room.
        excess = max(waiting(self._jobs).tokens - self._kept.tokens, 0)
        room = self._config.max_cached_tokens - excess
        line = [
            repeat(job, job.request.num_samples - job.started) for job in self._jobs if job.is_read
        ]
        for job in chain.from_iterable(line):
            sequence = Running(job.request, job.started, job.weights)
            if not self._fit([*starting, (job, sequence)], room):
                break
            starting.append((job, sequence))
            job.started += 1
            job.running.append(sequence)
        if starting:
            jobs = list(dict.fromkeys(job for job, _ in starting))
            self._guarded(jobs, lambda: self._start(starting))

    def _start(self, starting: Sequence[tuple[Job, Running]]) -> None:
        """Draw the first tokens of samples, and let those join that go on."""
        logits = [job.last_logits for job, _ in starting if job.last_logits is not None]
        self._token_sampler.extend([sequence for _, sequence in starting], torch.stack(logits))
        for job, sequence in starting:
            if not sequence.is_done and job.batch is not None:
                job.batch.join(sequence, job.key_values)
        for job, _ in starting:
            if not job.is_waiting:
                # Its samples have copies.
                job.cache, job.key_values = None, ()

    def _fit(self, starting: Sequence[tuple[Job, Running]], room: int) -> bool:
        """Whether sequences may join. A single one always may, or it would wait for ever."""
        count = self._num_running + len(starting)
        # What draws no second token takes no slot.
        joining = [pair for pair in starting if pair[1].request.max_tokens > 1]
        return count == 1 or (
            count <= self._config.max_running_sequences and self._tokens_with(joining) <= room
        )

    def _has_room_to_read(self, job: Job) -> bool:
        """Whether a prompt may be read and wait for its samples to join."""
        held, length = waiting(self._jobs), len(job.request.prompt)
        if held.sequences:
            return (
                held.sequences < self._kept.sequences and held.tokens + length <= self._kept.tokens
            )
        excess = max(length - self._kept.tokens, 0)
        room = self._config.max_cached_tokens - excess
        return not self._num_running or self._tokens_with([]) <= room

    @property
    def _num_running(self) -> int:
        return sum(len(batch.sequences) for batch in self._all_batches)

    @property
    def _all_batches(self) -> list[DecodingBatch | UnbatchedDecoding]:
        return [*self._batches.values(), self._unbatched]

    def _tokens_with(self, starting: Sequence[tuple[Job, Running]]) -> int:
        """Return the positions that running sequences come to take, with those that join."""
        return sum(
            batch.tokens_with([sequence for job, sequence in starting if job.batch is batch])
            for batch in self._all_batches
        )

    def _collect(self, job: Job) -> None:
        """Take a job's ended sequences; answer it when all have."""
        for sequence in [sequence for sequence in job.running if sequence.is_done]:
            job.running.remove(sequence)
            job.sequences[sequence.index] = sequence.result()
        if len(job.sequences) == job.request.num_samples and job.scorer is not None:
            sequences = [job.sequences[index] for index in range(job.request.num_samples)]
            self._finish(job, SamplingResult(sequences, job.scorer.finish(job.reused)))

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.is_cancelled()]:
            self._finish(job, InvalidRequest("cancelled"))

    def _finish(self, job: Job, result: SamplingResult | Exception) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        if job.batch is not None:
            job.batch.leave(job.running)
        for key, batch in list(self._batches.items()):
            if key is not None and not any(other.batch is batch for other in self._jobs):
                del self._batches[key]
        self._release(job.version)
        job.resolve(result)


def _settle(done: "asyncio.Future[SamplingResult]", result: SamplingResult | Exception) -> None:
    if done.done():
        return
    if isinstance(result, SamplingResult):
        done.set_result(result)
    else:
        done.set_exception(result)
