"""Sampling requests, which the session head of their sampling session executes."""

from tinkercloud_api.routes.call import Call, wait_for_head
from tinkercloud_protocol import envelope


async def asample(call: Call) -> None:
    """Forward a sampling request to a head that serves its sampling session."""
    body = await call.request.body(call.server.settings.limits.max_body_bytes)
    sampler_id = envelope.peek_json(body, "sampling_session_id")
    locator = call.server.locator
    await locator.authorize_sampler(sampler_id, call.principal)
    if (run_id := await locator.run_of_sampler(sampler_id)) is not None:
        call.server.activity.touch(run_id)
    endpoint = await wait_for_head(
        locator.head_of_sampler(sampler_id), lambda: locator.sampler_pending(sampler_id)
    )
    await call.forward(endpoint, sampler_id, body)
