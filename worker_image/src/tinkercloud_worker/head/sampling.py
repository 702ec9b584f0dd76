"""Runs one sampling request: within its owner's token limit, and counted."""

from tinkercloud_protocol import futures
from tinkercloud_protocol.futures import Result
from tinkercloud_protocol.ids import SamplingSessionId
from tinkercloud_protocol.payloads import encode_sample_response
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.requests import Prepared
from tinkercloud_worker.head.samplers import Samplers


async def run_sample(
    backend: Backend, samplers: Samplers, owner: str, prepared: Prepared
) -> Result:
    """Sample, after the owner's earlier samples have started and when tokens are left.

    Args:
        backend: the parts of the head.
        samplers: the sampling sessions.
        owner: owner of the request's session.
        prepared: the request.
    """
    request = prepared.validated
    session_id = SamplingSessionId.parse(prepared.request.sampling_session_id)
    reserved = len(request.prompt) + request.num_samples * request.max_tokens
    # The version is in use from here on: it is neither replaced nor evicted while this waits.
    async with samplers.sampling(session_id) as version:
        sent = request.sent_by(samplers.payer_of(session_id))
        await backend.token_limits.turn(owner, reserved)
        used = 0
        try:
            result = await backend.sampler.sample(version, sent)
            usage = result.usage(len(sent.prompt))
            used = usage.prefill_tokens + usage.sampled_tokens
        finally:
            backend.token_limits.spend(owner, used - reserved)
    backend.usage.count(sent.payer, usage)
    return Result(encode_sample_response(result.sequences, result.prompt), futures.PROTOBUF)
