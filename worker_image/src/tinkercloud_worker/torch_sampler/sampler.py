"""The torch sampler: requests in, results out, computing on the engine thread.

Two threads meet here. Coroutines on the event loop hand requests over and wait; `step`, on the
engine thread, admits them, reads their prompts a chunk at a time, lets their samples join the
running batch as slots come free, and hands results back. Everything after the inbox belongs to
the engine thread alone.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.errors import InvalidRequest, Overloaded, WireError
from tinkercloud_protocol.launch import SamplerConfig
from tinkercloud_protocol.payloads import SampledSequence
from tinkercloud_worker.base_model import ActiveWeights, BaseModel, Route
from tinkercloud_worker.engine.sampler import SamplingRequest, SamplingResult
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.torch_sampler.cache import KeyValues, PrefillCache
from tinkercloud_worker.torch_sampler.decoding import DecodingBatch, Drawer, Running
from tinkercloud_worker.torch_sampler.prefixes import PrefixStore
from tinkercloud_worker.torch_sampler.scoring import PromptScorer
from tinkercloud_worker.torch_sampler.versions import Versions

log = structlog.get_logger(__name__)

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at a time."""
_PREFIX_SHARE = 4
"""One part in so many of the key-value room is kept for prompts read lately."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way through."""

    version: str
    request: SamplingRequest
    resolve: Callable[[SamplingResult | Exception], None]
    is_cancelled: Callable[[], bool]
    weights: ActiveWeights | None = None
    batch: DecodingBatch | None = None
    cache: PrefillCache | None = None
    scorer: PromptScorer | None = None
    read: int = 0
    """Prompt tokens whose keys and values are known."""
    reused: int = 0
    """How many of them came from an earlier prompt."""
    last_logits: Tensor | None = None
    """Logits [V] after the prompt's last token, once it is read."""
    started: int = 0
    """Samples that have joined the batch."""
    running: list[Running] = field(default_factory=list)
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def is_read(self) -> bool:
        return self.last_logits is not None

    @property
    def longest(self) -> int:
        """Positions its longest sequence may come to hold."""
        return len(self.request.prompt) + self.request.max_tokens


class TorchSampler:
    """See `engine.sampler.Sampler` and `engine.thread.Background`, whose contracts it fulfils."""

    def __init__(
        self,
        base: BaseModel,
        tokenizer: PreTrainedTokenizerBase,
        config: SamplerConfig,
        *,
        versions: Versions,
        wake: Callable[[], None],
    ) -> None:
        self._base = base
        self._config = config
        self._versions = versions
        self._wake = wake
        self._drawer = Drawer(tokenizer)
        self._prefixes = PrefixStore(config.max_cached_tokens // _PREFIX_SHARE)
        self._lock = threading.Lock()
        self._inbox: deque[_Job] = deque()
        self._queued = 0
        self._jobs: list[_Job] = []
        self._batches: dict[int | None, DecodingBatch] = {}

    async def publish(self, version: str, weights: WeightsSnapshot | None) -> None:
        """See `Sampler.publish`."""
        with self._lock:
            self._versions.add(version, weights)

    async def retire(self, version: str) -> None:
        """See `Sampler.retire`."""
        with self._lock:
            self._versions.remove(version)
            self._prefixes.forget(version)

    async def export(self, version: str) -> WeightsSnapshot | None:
        """See `Sampler.export`."""

        def export() -> WeightsSnapshot | None:
            with self._lock:
                return self._versions.export(version)

        return await asyncio.to_thread(export)

    async def sample(self, version: str, request: SamplingRequest) -> SamplingResult:
        """See `Sampler.sample`."""
        if self._queued >= self._config.max_queued_requests:
            raise Overloaded(
                f"{self._queued} sampling requests wait already; slow down and send this one again"
            )
        longest = len(request.prompt) + request.max_tokens
        if longest > self._config.max_cached_tokens:
            raise InvalidRequest(
                f"prompt and max_tokens come to {longest} tokens, more than the"
                f" {self._config.max_cached_tokens} this server keeps in memory; lower max_tokens"
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[SamplingResult] = loop.create_future()

        def resolve(result: SamplingResult | Exception) -> None:
            loop.call_soon_threadsafe(_settle, done, result)

        self._queued += 1
        self._inbox.append(_Job(version, request, resolve, done.cancelled))
        self._wake()
        try:
            return await done
        finally:
            self._queued -= 1

    async def close(self) -> None:
        """See `Sampler.close`. Everything is in this process."""

    def has_work(self) -> bool:
        """See `Background.has_work`."""
        return bool(self._inbox or self._jobs)

    def step(self) -> None:
        """See `Background.step`: read a chunk of prompts, then draw one token everywhere."""
        while self._inbox:
            self._jobs.append(self._inbox.popleft())
        self._drop_cancelled()
        self._read_prompts()
        for job in [job for job in self._jobs if job.is_read]:
            self._guarded([job], lambda job=job: self._start_samples(job))  # type: ignore[misc]
        for batch in list(self._batches.values()):
            if batch.sequences:
                members = [job for job in self._jobs if job.batch is batch]
                self._guarded(members, lambda batch=batch: batch.step())  # type: ignore[misc]
        for job in list(self._jobs):
            self._collect(job)

    def _guarded(self, jobs: list[_Job], work: Callable[[], object]) -> None:
        """Do some work; if it fails, so do the requests it was for, and no others."""
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
        for job in [job for job in self._jobs if not job.is_read]:
            before = job.read
            self._guarded([job], lambda job=job, left=left: self._read(job, left))  # type: ignore[misc]
            left -= job.read - max(before, job.reused)
            if left <= 0:
                return

    def _read(self, job: _Job, max_tokens: int) -> None:
        """Read the next tokens of a prompt; begin with what is known of it."""
        request, prompt = job.request, job.request.prompt
        if job.cache is None or job.batch is None or job.scorer is None:
            self._admit(job)
            assert job.cache is not None and job.batch is not None and job.scorer is not None  # noqa: S101, PT018
        start = job.read
        stop = min(start + max_tokens, len(prompt))
        chunk = prompt[start:stop].tolist()
        hidden_TD = job.batch.prefill(job.cache, chunk, start, job.weights)
        job.read = stop
        self._score(job, job.scorer, start, hidden_TD)
        if stop == len(prompt):
            job.last_logits = self._logits(job, hidden_TD[-1:])[0]
            self._prefixes.add(job.version, request.prompt, job.cache.key_values())

    def _admit(self, job: _Job) -> None:
        with self._lock:
            job.weights = self._versions.get(job.version)
            job.scorer = PromptScorer(job.request)
            first_needed = job.scorer.first_needed
            reusable = len(job.request.prompt) - 1
            if first_needed is not None:
                reusable = min(reusable, first_needed)
            job.reused, prefix = self._prefixes.find(job.version, job.request.prompt, reusable)
        job.read = job.reused
        is_whole_model = job.weights is not None and job.weights.lora_scale is None
        key = id(job.weights) if is_whole_model else None
        if key not in self._batches:
            self._batches[key] = DecodingBatch(self._base, self._drawer)
        job.batch = self._batches[key]
        job.cache = job.batch.new_prefill_cache(len(job.request.prompt), prefix)

    def _score(self, job: _Job, scorer: PromptScorer, start: int, hidden_TD: Tensor) -> None:
        needed = scorer.first_needed
        if needed is None:
            return
        for row in range(max(needed - start, 0), len(hidden_TD), _SCORED_ROWS):
            logits_RV = self._logits(job, hidden_TD[row : row + _SCORED_ROWS])
            scorer.add(start + row, logits_RV)

    def _logits(self, job: _Job, hidden_RD: Tensor) -> Tensor:
        return self._base.logits(hidden_RD, [Route(slice(None), job.weights)])

    def _start_samples(self, job: _Job) -> None:
        """Let as many of a request's samples join the running batch as there is room for."""
        batch, logits = job.batch, job.last_logits
        if batch is None or logits is None or job.cache is None:
            return
        prompt: KeyValues = job.cache.key_values()
        while job.started < job.request.num_samples and self._has_room(batch, job):
            sequence = Running(job.request, job.started, job.weights)
            self._drawer.extend([sequence], logits.unsqueeze(0))
            job.started += 1
            job.running.append(sequence)
            if not sequence.is_done:
                batch.join(sequence, prompt)

    def _has_room(self, batch: DecodingBatch, job: _Job) -> bool:
        count = sum(len(other.sequences) for other in self._batches.values())
        if count >= self._config.max_running_sequences:
            return False
        members = [other for other in self._jobs if other.batch is batch and other.started]
        longest = max([job.longest, *(other.longest for other in members)])
        return not batch.sequences or (
            (len(batch.sequences) + 1) * longest <= self._config.max_cached_tokens
        )

    def _collect(self, job: _Job) -> None:
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

    def _finish(self, job: _Job, result: SamplingResult | Exception) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        if job.batch is not None:
            job.batch.leave(job.running)
        for key, batch in list(self._batches.items()):
            if key is not None and not any(other.batch is batch for other in self._jobs):
                del self._batches[key]
        job.resolve(result)


def _settle(done: "asyncio.Future[SamplingResult]", result: SamplingResult | Exception) -> None:
    if done.done():
        return
    if isinstance(result, SamplingResult):
        done.set_result(result)
    else:
        done.set_exception(result)
