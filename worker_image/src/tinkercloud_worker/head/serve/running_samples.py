"""The sampling requests of a head that are not finished."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId
from tinkercloud_worker.engine.sampling.sampling_request import prepare
from tinkercloud_worker.head.backend import Backend, random_seed
from tinkercloud_worker.head.durable.recovery import Recovery
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.requests import (
    Prepared,
    body_digest,
    content_digest,
    sample_request_id,
)
from tinkercloud_worker.head.sampling.sample_limiter import SampleLimiter
from tinkercloud_worker.head.sampling.sample_runner import run_sample
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.sampling.unfinished_sample import Sample
from tinkercloud_worker.head.wire.failed_results import to_result


class RunningSamples:
    """Starts sampling requests, and publishes their results. Belongs to one event loop."""

    def __init__(
        self, backend: Backend, samplers: Samplers, results: Results, recovery: Recovery
    ) -> None:
        """Start without requests.

        Args:
            backend: the parts of the head.
            samplers: its sampling sessions.
            results: where results are published.
            recovery: knows which sessions a journal publishes again.
        """
        self._backend = backend
        self._samplers = samplers
        self._results = results
        self._recovery = recovery
        self._samples: dict[str, Sample] = {}
        config = backend.config
        self.limiter = SampleLimiter(
            config.sampler.max_queued_requests, config.limits.max_queued_bytes
        )
        """How many requests each owner may have."""

    @property
    def by_id(self) -> Mapping[str, Sample]:
        """The unfinished requests by request id, as they change."""
        return self._samples

    def prepare(self, request: SampleRequest) -> Prepared:
        """Validate a request. Changes nothing here, so it may run in a thread.

        Raises:
            InvalidRequest: it is invalid.
        """
        backend, as_json = self._backend, request.model_dump_json().encode()
        limits, ends = backend.trainer.limits, backend.end_tokens
        validated = prepare(request, limits, ends, random_seed(), images=backend.images)
        size = len(as_json) + validated.num_bytes
        return Prepared(request, validated, body_digest(as_json), size)

    def submit(self, prepared: Prepared) -> RequestId:
        """Queue a request; return its id. A repeated one is the same request.

        Raises:
            InvalidRequest: the number was used with other content.
            Overloaded: the owner has too many.
        """
        request_id = prepared.request_id
        known = self._results.digest(str(request_id))
        if known is not None and known != prepared.digest:
            raise InvalidRequest(
                f"seq_id {prepared.request.seq_id} was already used by a request with"
                " different content; give each request its own number"
            )
        if known is None:
            self.limiter.check(self._owner_of(prepared.request), prepared.size)
            self._start(prepared)
        return request_id

    def restart(self, request: SampleRequest, owner: str) -> None:
        """Run an accepted request of another head, regardless of the limits.

        Args:
            request: the request; one that this release rejects fails.
            owner: its owner.
        """
        try:
            self._start(self.prepare(request))
        except InvalidRequest as error:
            request_id = str(sample_request_id(request))
            self._results.open(request_id, content_digest(request), owner)
            self._results.finish(request_id, future_responses.failed_with(error))

    def _owner_of(self, request: SampleRequest) -> str:
        return self._samplers.owner_of(request.sampling_session_id) or ""

    def _start(self, prepared: Prepared) -> None:
        request, request_id = prepared.request, prepared.request_id
        owner = self._owner_of(request)
        session_id = SamplingSessionId.parse(request.sampling_session_id)
        self._results.open(str(request_id), prepared.digest, owner)

        async def work() -> Result:
            await self._recovery.published(session_id)
            return await run_sample(self._backend, self._samplers, owner, prepared)

        def report_cancellation(task: asyncio.Task[None]) -> None:
            # A done callback, because the task may be cancelled before it starts.
            if task.cancelled():
                self._finish(
                    str(request_id), future_responses.failed("the request was cancelled", "user")
                )

        timed = self._backend.spans.timed(str(session_id), "sample", owner, work)
        task = asyncio.create_task(self._resolve(str(request_id), timed))
        task.add_done_callback(report_cancellation)
        self._samples[str(request_id)] = Sample(request, owner, prepared.size, task)
        self.limiter.add(owner, prepared.size)

    async def _resolve(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - the future must resolve after any failure
            result = to_result(error)
        self._finish(request_id, result)

    def _finish(self, request_id: str, result: Result) -> None:
        if (sample := self._samples.pop(request_id, None)) is not None:
            self.limiter.remove(sample.owner, sample.size)
        self._results.finish(request_id, result)

    def cancel(self, request_id: str) -> None:
        """Cancel a request, which may be unknown or finished."""
        if (sample := self._samples.get(request_id)) is not None:
            sample.task.cancel()

    def cancel_of(self, session_id: SamplingSessionId) -> None:
        """Cancel all requests of a sampling session."""
        for sample in self._samples.values():
            if sample.request.sampling_session_id == str(session_id):
                sample.task.cancel()

    def close(self) -> None:
        """Cancel all requests."""
        for sample in self._samples.values():
            sample.task.cancel()
