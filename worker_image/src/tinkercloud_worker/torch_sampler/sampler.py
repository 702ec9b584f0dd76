"""The torch sampler: requests in, results out, computing on the engine thread.

Two threads meet here. Coroutines on the event loop submit requests and wait; `step`, on the engine
thread, admits requests, prefills their prompts chunk by chunk, schedules their samples into the
running batch as slots become free, and returns results. Everything except the inbox belongs to the
engine thread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from tinkercloud_protocol.wire.errors import InvalidRequest, WireError
from tinkercloud_worker.engine.sampling.sampler_interface import (
    Sampler,
    SamplingRequest,
    SamplingResult,
)
from tinkercloud_worker.engine.trainer import Publication, WeightsSnapshot
from tinkercloud_worker.engine.turns.engine_thread import Background, Tokens
from tinkercloud_worker.engine.turns.fair_queue import Accounts
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
from tinkercloud_worker.torch_sampler.jobs import Job, in_turn, tokens_of_step, waiting
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore, common_length
from tinkercloud_worker.torch_sampler.scoring import PromptScorer
from tinkercloud_worker.torch_sampler.versions import Version, Versions

log = logging.getLogger(__name__)

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at a time for scoring."""
_WORTH_WAITING_FOR = 256
"""Minimum common prefix for which a prompt waits until another one is prefilled."""
_KEPT_SHARE = 4
"""Divisor of the KV cache budget that gives the share of the prefix cache. If steps are captured,
the same share stays allocated without sequences, so that captured graphs remain valid."""


class TorchSampler(Sampler, Background):
    """A sampler that computes on the engine thread, between training jobs."""

    def __init__(
        self,
        base: TorchBaseModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Capacity,
        *,
        versions: Versions,
        wake: Callable[[], None],
        weights: Mapping[str, int] | None = None,
        graph_capturer: GraphCapturer | None = None,
    ) -> None:
        """Create a sampler without versions.

        Args:
            base: the model.
            tokenizer: the model's tokenizer.
            config: its limits.
            versions: the store of published weights.
            wake: notifies the engine thread of new work; thread-safe.
            weights: the shares of owners, at least 1; an owner that is missing has 1.
            graph_capturer: captures decoding steps; None: steps run eagerly.
        """
        self._base = base
        self._config = config
        self._versions = versions
        self._wake = wake
        self._graph_capturer = graph_capturer
        self._token_sampler = TokenSampler(tokenizer, config.sampled_logprobs)
        decoding = check_decoding(base, self._token_sampler)
        self._slotted = decoding.slotted
        self._unbatched = UnbatchedDecoding(base, self._token_sampler, decoding.new_cache)
        kept_tokens = config.max_cached_tokens // _KEPT_SHARE
        self._prefixes = PrefixStore(kept_tokens)
        self._kept = KvBudget(config.max_running_sequences, kept_tokens)
        self._accounts = Accounts(weights)
        self._inbox: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._batches: dict[int | None, DecodingBatch] = {}

    @override
    async def publish(self, version: str, weights: Publication | None) -> None:
        """Publish weights; raise OSError if neither memory nor the scratch folder can hold them."""
        if version in self._versions:
            return
        # Weights stored on ranks are only for inference servers.
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
        self._base.images.forget()
        # Captured steps refer to the memory of a batch.
        if self._graph_capturer is None and not self._jobs and not self._num_running:
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
                f"prompt plus max_tokens is {request.num_positions + 1} tokens, but the KV cache"
                f" of this server holds at most {self._config.max_cached_tokens} (the last"
                " token is not cached); lower max_tokens"
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
        """Do nothing: everything is in this process."""

    @override
    def has_work(self) -> bool:
        return bool(self._inbox or self._jobs)

    @override
    def step(self) -> Tokens:
        """Prefill a chunk of prompts, then run one decoding step of every batch."""
        self._receive()
        self._abort_cancelled()
        jobs = list(self._jobs)
        self._prefill_prompts()
        self._schedule_samples()
        computed = tokens_of_step(jobs)
        for batch in self._all_batches:
            if batch.sequences:
                self._step(batch)
        for job in list(self._jobs):
            self._collect(job)
        return computed

    def _receive(self) -> None:
        """Add the requests that have arrived."""
        if not self._inbox:
            return
        owners = dict.fromkeys(job.owner for job in self._jobs)
        self._accounts.forget_idle(owners)
        while self._inbox:
            job = self._inbox.popleft()
            self._jobs.append(job)
            if job.owner not in owners:
                owners[job.owner] = None
                self._accounts.enter(job.owner)

    def _guarded(self, job: Job, work: Callable[[], object]) -> None:
        """Run some work for a request; if it raises, the request fails."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the request gets it
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, WireError):
            log.error("sampling failed", exc_info=error)
        self._finish(job, error)

    @staticmethod
    def _step(batch: DecodingBatch | UnbatchedDecoding) -> None:
        """Run a decoding step; if it fails, run it for each sequence by itself."""
        try:
            batch.step()
        except Exception:
            log.exception("a decoding step failed; its sequences run one by one")
            batch.step_each()

    def _prefill_prompts(self) -> None:
        """Prefill prompts in the order of turns, up to one chunk of tokens."""
        left = self._config.prefill_chunk_tokens
        together: list[Job] = []
        is_full = False
        for job in in_turn(
            self._accounts, ((job, 1) for job in self._jobs if not job.is_prefilled)
        ):
            if left <= 0:
                break
            if self._should_await_prefix(job, together):
                continue
            # No prompt overtakes one that lacks memory, but partially prefilled prompts continue.
            is_full = is_full or not (job.batch is not None or self._can_prefill(job))
            if is_full and job.batch is None:
                continue
            self._accounts.take(job.owner)
            self._guarded(job, lambda job=job: self._admit(job))  # type: ignore[misc]
            if job not in self._jobs:
                continue
            count = len(job.request.prompt) - job.prefilled
            if job.batch is not self._unbatched:
                count = job.next_chunk(left)
            if self._can_share_prefill(job) and count == len(job.request.prompt):
                together.append(job)
            else:
                self._guarded(job, lambda job=job, count=count: self._prefill_chunk(job, count))  # type: ignore[misc]
            self._accounts.charge(job.owner, count)
            left -= count
        if together:
            self._prefill_together(together)

    def _prefill_together(self, jobs: Sequence[Job]) -> None:
        """Prefill several full prompts in one pass; if it fails, each by itself."""
        try:
            self._prefill_batch(jobs)
        except Exception:
            log.exception("a shared prefill failed; its prompts run one by one")
            for job in [job for job in jobs if not job.is_prefilled]:
                job.prefilled = 0
                length = len(job.request.prompt)
                self._guarded(
                    job,
                    lambda job=job, length=length: self._prefill_chunk(job, length),  # type: ignore[misc]
                )

    def _can_share_prefill(self, job: Job) -> bool:
        """Whether a prompt is prefilled in one pass with others, where launch overhead dominates.

        A shared pass can't use the weights of full models, and starts at the beginning of each
        prompt.
        """
        return (
            self._graph_capturer is not None
            and job.batch is not self._unbatched
            and self._base.takes_packs
            and not job.runs_apart
            and job.prefilled == 0
        )

    @staticmethod
    def _should_await_prefix(job: Job, others: Sequence[Job]) -> bool:
        """Whether a long prefix of a prompt is being prefilled already and can be reused."""
        return job.batch is None and any(
            other.version is job.version
            and common_length(other.prompt, job.prompt) >= _WORTH_WAITING_FOR
            for other in others
        )

    def _prefill_chunk(self, job: Job, count: int) -> None:
        """Prefill the next tokens of a prompt."""
        assert job.cache is not None and job.batch is not None  # noqa: S101, PT018 - admitted
        prompt, start = job.request.prompt, job.prefilled
        job.prefilled += count
        chunk = prompt[start : job.prefilled].tolist()
        hidden_TD = job.batch.prefill(job.cache, chunk, start, job.weights, job.request.images)
        self._score(job, start, hidden_TD)
        if job.prefilled == len(prompt):
            logits_1V = self._base.logits(hidden_TD[-1:], single_segment(job.weights))
            self._finish_prefill(job, job.cache.key_values(), logits_1V[0])

    def _prefill_batch(self, jobs: Sequence[Job]) -> None:
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
            self._finish_prefill(job, key_values, logits_V)

    def _finish_prefill(self, job: Job, key_values: KeyValues, last_logits_V: Tensor) -> None:
        job.key_values, job.last_logits = key_values, last_logits_V
        if key_values:
            self._prefixes.add(job.version, job.prompt, key_values)

    def _admit(self, job: Job) -> None:
        """Start the prefill of a prompt from its cached prefix, unless already admitted."""
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
            job.reused, prefix = self._prefixes.find(job.version, job.prompt, reusable)
        job.prefilled = job.reused
        job.cache = job.batch.new_prefill_cache(len(job.request.prompt), prefix)

    def _batch_for(self, job: Job) -> DecodingBatch | UnbatchedDecoding:
        """Return the batch that a job's sequences will join."""
        if job.request.num_positions > self._slotted:
            return self._unbatched
        key = id(job.weights) if job.runs_apart else None
        if key not in self._batches:
            # Only steps of the base and of usual adapters are captured.
            self._batches[key] = (
                DecodingBatch(self._base, self._token_sampler)
                if job.runs_apart or self._graph_capturer is None
                else DecodingBatch(
                    self._base,
                    self._token_sampler,
                    graph_capturer=self._graph_capturer,
                    kept=self._kept,
                )
            )
        return self._batches[key]

    def _score(self, job: Job, start: int, hidden_TD: Tensor) -> None:
        needed = job.scorer.first_needed if job.scorer is not None else None
        if job.scorer is None or needed is None:
            return
        for row in range(max(needed - start, 0), len(hidden_TD), _SCORED_ROWS):
            rows_RD = hidden_TD[row : row + _SCORED_ROWS]
            job.scorer.add(start + row, self._base.logits(rows_RD, single_segment(job.weights)))

    def _schedule_samples(self) -> None:
        """Add samples of prefilled prompts to batches, in the order of turns, if memory suffices.

        Samples do not overtake one that must wait, or short ones could starve a long one.
        """
        starting: list[tuple[Job, RunningSequence]] = []
        # A prompt longer than the budget of waiting prompts uses memory of running sequences.
        excess = max(waiting(self._jobs).tokens - self._kept.tokens, 0)
        room = self._config.max_cached_tokens - excess
        waiting_jobs = [
            (job, job.request.num_samples - job.started) for job in self._jobs if job.is_prefilled
        ]
        for job in in_turn(self._accounts, waiting_jobs):
            sequence = RunningSequence(job.request, job.started, job.weights)
            if not self._can_schedule([*starting, (job, sequence)], room):
                break
            starting.append((job, sequence))
            job.started += 1
            job.running.append(sequence)
            self._accounts.take(job.owner)
            self._accounts.charge(job.owner, sequence.request.max_tokens)
        if starting:
            self._start_decoding(starting)

    def _start_decoding(self, starting: Sequence[tuple[Job, RunningSequence]]) -> None:
        """Sample first tokens, and add the samples that continue to their batch."""
        try:
            self._extend(starting)
        except Exception:
            log.exception("sampling first tokens failed; they are sampled one by one")
            for job, sequence in starting:
                self._guarded(job, lambda pair=(job, sequence): self._extend([pair]))  # type: ignore[misc]
        for job, sequence in starting:
            if job in self._jobs and not sequence.is_done:
                self._guarded(job, lambda job=job, sequence=sequence: self._join(job, sequence))  # type: ignore[misc]
        for job, _ in starting:
            if not job.is_waiting:
                # The slots of its samples hold copies.
                job.cache, job.key_values = None, ()

    def _extend(self, starting: Sequence[tuple[Job, RunningSequence]]) -> None:
        logits = [job.last_logits for job, _ in starting if job.last_logits is not None]
        self._token_sampler.extend([sequence for _, sequence in starting], torch.stack(logits))

    @staticmethod
    def _join(job: Job, sequence: RunningSequence) -> None:
        assert job.batch is not None  # noqa: S101 - prefilled
        job.batch.add(sequence, job.key_values)

    def _can_schedule(self, starting: Sequence[tuple[Job, RunningSequence]], room: int) -> bool:
        """Whether sequences may join. A single one always may, or it would never run.

        An owner without running sequences may have one beyond the maximum number.
        """
        count = self._num_running + len(starting)
        # A sequence of one token needs no slot.
        joining = [pair for pair in starting if pair[1].request.max_tokens > 1]
        return count == 1 or (
            (count <= self._config.max_running_sequences or self._is_first(starting))
            and self._cache_tokens_with(joining) <= room
        )

    def _is_first(self, starting: Sequence[tuple[Job, RunningSequence]]) -> bool:
        """Whether the last of these sequences is the only one of its owner."""
        *others, (last, _) = starting
        return not any(job.owner == last.owner for job, _ in others) and not any(
            job.running for job in self._jobs if job.owner == last.owner
        )

    def _can_prefill(self, job: Job) -> bool:
        """Whether memory suffices to prefill a prompt and keep it until its samples join."""
        held, length = waiting(self._jobs), len(job.request.prompt)
        if held.sequences:
            # An owner without waiting prompts may have one beyond the maximum number.
            has_place = held.sequences < self._kept.sequences or not any(
                other.is_waiting for other in self._jobs if other.owner == job.owner
            )
            return has_place and held.tokens + length <= self._kept.tokens
        excess = max(length - self._kept.tokens, 0)
        room = self._config.max_cached_tokens - excess
        return not self._num_running or self._cache_tokens_with([]) <= room

    @property
    def _num_running(self) -> int:
        return sum(len(batch.sequences) for batch in self._all_batches)

    @property
    def _all_batches(self) -> list[DecodingBatch | UnbatchedDecoding]:
        return [*self._batches.values(), self._unbatched]

    def _cache_tokens_with(self, starting: Sequence[tuple[Job, RunningSequence]]) -> int:
        """Return the positions that running and joining sequences will occupy."""
        return sum(
            batch.cache_tokens_with([sequence for job, sequence in starting if job.batch is batch])
            for batch in self._all_batches
        )

    def _collect(self, job: Job) -> None:
        """Collect a job's finished sequences; resolve the job when all have finished."""
        if (error := job.failure) is not None:
            self._fail(job, error)
            return
        for sequence in [sequence for sequence in job.running if sequence.is_done]:
            job.running.remove(sequence)
            self._give_back(sequence)
            job.sequences[sequence.index] = sequence.result()
        if len(job.sequences) == job.request.num_samples and job.scorer is not None:
            sequences = [job.sequences[index] for index in range(job.request.num_samples)]
            self._finish(job, SamplingResult(sequences, job.scorer.finish(job.reused)))

    def _give_back(self, sequence: RunningSequence) -> None:
        """Take the tokens that a sequence did not sample from its owner's account."""
        request = sequence.request
        self._accounts.charge(request.owner, len(sequence.tokens) - request.max_tokens)

    def _abort_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.is_cancelled()]:
            self._finish(job, InvalidRequest("cancelled"))

    def _finish(self, job: Job, result: SamplingResult | Exception) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        for sequence in job.running:
            self._give_back(sequence)
        if job.batch is not None:
            job.batch.abort(job.running)
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
