"""Runs one sampling request: within its owner's token limit, and counted."""

from dataclasses import replace
from time import perf_counter

from tinkercloud_protocol.requests.payloads import encode_sample_response
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import SamplingSessionId
from tinkercloud_worker.engine.sampling.sampler_interface import SampledToken, SamplingRequest
from tinkercloud_worker.engine.turns.usage_counts import Usage
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.order.requests import Prepared
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.wire.request_times import count_pause, count_tokens
from tinkercloud_worker.metrics import FIRST_TOKEN_SECONDS


async def run_sample(
    backend: Backend, samplers: Samplers, owner: str, prepared: Prepared
) -> Result:
    """Sample, after the owner's earlier samples have started and when tokens are left.

    Tokens that a client has received as they were sampled are counted even if it then cancels the
    request.

    Args:
        backend: the parts of the head.
        samplers: the sampling sessions.
        owner: owner of the request's session.
        prepared: the request.
    """
    request = prepared.validated
    session_id = SamplingSessionId.parse(prepared.request.sampling_session_id)
    reserved = len(request.prompt) + request.num_samples * request.max_tokens
    reported = _Reported(len(request.prompt))
    # The version is in use from here on: it is neither replaced nor evicted while this waits.
    async with samplers.sampling(session_id) as version:
        sent = reported.watching(request.sent_by(samplers.payer_of(session_id)))
        step = samplers.step_of(session_id, version)
        started = None if request.only_scores else backend.kept_samples.start(sent.payer, step)
        count_pause(await backend.token_limits.turn(owner, reserved))
        usage = Usage()
        try:
            result = await backend.sampler.sample(version, sent)
            usage = result.usage(len(sent.prompt))
            if started is not None:
                backend.kept_samples.end(started, sent.prompt, result.sequences[0].tokens)
        except BaseException:
            usage = reported.usage
            raise
        finally:
            used = usage.prefill_tokens + usage.sampled_tokens
            backend.token_limits.spend(owner, used - reserved)
            if usage != Usage():
                backend.usage.count(sent.payer, usage)
                count_tokens(usage.computed_tokens)
    return Result(
        encode_sample_response(result.sequences, result.prompt), future_responses.PROTOBUF
    )


class _Reported:
    """Counts the tokens that a request has reported so far. Used by one thread at a time."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._began = perf_counter()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def watching(self, request: SamplingRequest) -> SamplingRequest:
        """Return the request with its reports counted, if it reports its tokens."""
        report = request.on_token
        if report is None:
            return request

        def counted(token: SampledToken) -> None:
            if not self._num_tokens:
                FIRST_TOKEN_SECONDS.observe(perf_counter() - self._began)
            self._num_tokens += 1
            report(token)

        return replace(request, on_token=counted)

    @property
    def usage(self) -> Usage:
        """The usage of a request that has ended early; nothing if it has reported nothing."""
        if not self._num_tokens:
            return Usage()
        return Usage(prefill_tokens=self._num_prompt_tokens, sampled_tokens=self._num_tokens)
