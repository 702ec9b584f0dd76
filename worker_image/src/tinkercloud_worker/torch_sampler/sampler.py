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
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from tinkercloud_protocol.wire.errors import InvalidRequest, WireError
from tinkercloud_worker.engine.sampling.sampler_interface import (
    Sampler,
    SamplingRequest,
    SamplingResult,
)
from tinkercloud_worker.engine.trainer import Publication, WeightsCopy
from tinkercloud_worker.engine.turns.engine_thread import Background, Tokens
from tinkercloud_worker.engine.turns.fair_queue import Accounts
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.batches import Batches, Prefill, Starting
from tinkercloud_worker.torch_sampler.config import Capacity
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.decode.decoding import (
    RunningSequence,
    TokenSampler,
)
from tinkercloud_worker.torch_sampler.jobs import Job, in_turn, tokens_of_step
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore, common_length
from tinkercloud_worker.torch_sampler.versions import Version, Versions

log = logging.getLogger(__name__)

_WORTH_WAITING_FOR = 256
"""Minimum common prefix for which a prompt waits until another one is prefilled."""


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
        self._batches = Batches(base, self._token_sampler, config, graph_capturer)
        self._prefixes = PrefixStore(self._batches.kept.tokens)
        self._prefill = Prefill(base, self._prefixes)
        self._accounts = Accounts(weights)
        self._inbox: deque[Job] = deque()
        self._jobs: list[Job] = []

    @override
    async def publish(self, version: str, weights: Publication | None) -> None:
        """Publish weights; raise OSError if neither memory nor the scratch folder can hold them."""
        if version in self._versions:
            return
        # Weights stored on ranks are only for inference servers.
        assert weights is None or isinstance(weights, WeightsCopy)  # noqa: S101 - see above
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
        if self._graph_capturer is None and not self._jobs and not self._batches.num_running:
            self._batches.clear()

    @override
    async def retire(self, version: str) -> None:
        retired = self._versions.pop(version)
        if retired is not None:
            await asyncio.to_thread(self._release, retired)

    @override
    async def export(self, version: str) -> WeightsCopy | None:
        exported = self._versions.acquire(version)

        def export() -> WeightsCopy | None:
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
        self._batches.step()
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
            is_full = is_full or not (
                job.batch is not None or self._batches.can_prefill(job, self._jobs)
            )
            if is_full and job.batch is None:
                continue
            self._accounts.take(job.owner)
            self._guarded(job, lambda job=job: self._admit(job))  # type: ignore[misc]
            if job not in self._jobs:
                continue
            count = len(job.request.prompt) - job.prefilled
            if job.batch is not self._batches.unbatched:
                count = job.next_chunk(left)
            if self._prefill.can_share(job) and count == len(job.request.prompt):
                together.append(job)
            else:
                self._guarded(job, lambda job=job, count=count: self._prefill.run_chunk(job, count))  # type: ignore[misc]
            self._accounts.charge(job.owner, count)
            left -= count
        if together:
            self._prefill_together(together)

    def _prefill_together(self, jobs: Sequence[Job]) -> None:
        """Prefill several full prompts in one pass; if it fails, each by itself."""
        try:
            self._prefill.run_together(jobs)
        except Exception:
            log.exception("a shared prefill failed; its prompts run one by one")
            for job in [job for job in jobs if not job.is_prefilled]:
                job.prefilled = 0
                length = len(job.request.prompt)
                self._guarded(
                    job,
                    lambda job=job, length=length: self._prefill.run_chunk(job, length),  # type: ignore[misc]
                )

    @staticmethod
    def _should_await_prefix(job: Job, others: Sequence[Job]) -> bool:
        """Whether a long prefix of a prompt is being prefilled already and can be reused."""
        return job.batch is None and any(
            other.version is job.version
            and common_length(other.prompt, job.prompt) >= _WORTH_WAITING_FOR
            for other in others
        )

    def _admit(self, job: Job) -> None:
        """Start the prefill of a prompt, unless already admitted."""
        if job.batch is None:
            job.weights = self._versions.weights(job.version)
            self._prefill.begin(job, self._batches.of(job))

    def _schedule_samples(self) -> None:
        """Add samples of prefilled prompts to batches, in the order of turns, if memory suffices.

        Samples do not overtake one that must wait, or short ones could starve a long one.
        """
        starting: list[Starting] = []
        room = self._batches.room(self._jobs)
        waiting_jobs = [
            (job, job.request.num_samples - job.started) for job in self._jobs if job.is_prefilled
        ]
        for job in in_turn(self._accounts, waiting_jobs):
            sequence = RunningSequence(job.request, job.started, job.weights)
            if not self._batches.can_start([*starting, (job, sequence)], self._jobs, room):
                break
            starting.append((job, sequence))
            job.started += 1
            job.running.append(sequence)
            self._accounts.take(job.owner)
            self._accounts.charge(job.owner, sequence.request.max_tokens)
        if starting:
            self._start_decoding(starting)

    def _start_decoding(self, starting: Sequence[Starting]) -> None:
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

    def _extend(self, starting: Sequence[Starting]) -> None:
        logits = [job.last_logits for job, _ in starting if job.last_logits is not None]
        self._token_sampler.extend([sequence for _, sequence in starting], torch.stack(logits))

    @staticmethod
    def _join(job: Job, sequence: RunningSequence) -> None:
        assert job.batch is not None  # noqa: S101 - prefilled
        job.batch.add(sequence, job.key_values)

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
        self._batches.leave(job, self._jobs)
        self._release(job.version)
        job.resolve(result)


def _settle(done: "asyncio.Future[SamplingResult]", result: SamplingResult | Exception) -> None:
    if done.done():
        return
    if isinstance(result, SamplingResult):
        done.set_result(result)
    else:
        done.set_exception(result)
