"""create_custom_loss: upload a loss that the session heads compute.

Like all requests of a training client it returns a future; the loss exists when the request has
been answered.
"""

from fastapi import APIRouter, Response

from tinkercloud_api.access.effects import changes, declares
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.losses.traced_losses import CreateCustomLossRequest, CustomLossId
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest

router = APIRouter(prefix="/api/v1", tags=["models"])


@router.post("/create_custom_loss")
@declares(changes("loss_create"))
async def create_custom_loss(
    request: CreateCustomLossRequest, server: Server, caller: Caller
) -> Response:
    """Store a loss for the models of a session. This is idempotent."""
    loss_id = await server.custom_losses.create(request, caller)
    return Response(future_responses.promise(loss_id), media_type=future_responses.JSON)


def created_loss(request_id: str) -> CustomLossId | None:
    """Return the loss of a create_custom_loss request id, or None for other request ids."""
    try:
        return CustomLossId.parse(request_id)
    except InvalidRequest:
        return None
