"""unload_model and delete_model, one call that deletes a model but keeps its checkpoints.

SDKs before 0.30 send unload_model. Like all requests for a model, it returns a future. The head
deletes the model and cannot keep the result, so the result is derived from the catalog.
"""

from typing import Literal

import structlog
from fastapi import APIRouter, Response

from tinkercloud_api.access.effects import changes, declares
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import Name, WireModel

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["models"])

_SUFFIX = ":unload"


class UnloadModelRequest(WireModel):
    """POST unload_model or delete_model."""

    model_id: Name
    type: Literal["unload_model", "delete_model"] = "unload_model"


@router.post("/delete_model")
@router.post("/unload_model")
@declares(changes("model_delete"))
async def unload_model(request: UnloadModelRequest, server: Server, caller: Caller) -> Response:
    """Delete a model. This is idempotent."""
    model_id = str(ModelId.parse(request.model_id))
    await server.locator.known.authorize_run(model_id, caller)
    await server.training_runs.unload(model_id)
    log.info("model unloaded", model_id=model_id, owner=caller.owner)
    promise = future_responses.promise(f"{model_id}{_SUFFIX}", model_id=model_id)
    return Response(promise, media_type=future_responses.JSON)


def unloaded_model(request_id: str) -> str | None:
    """Return the model of an unload_model request id, or None for other request ids."""
    model_id = request_id.removesuffix(_SUFFIX)
    return model_id if model_id != request_id else None


async def result_of(model_id: str, server: Context) -> Result:
    """Return the result of an unload_model request.

    Raises:
        NotFound: the model was not unloaded.
    """
    run = await server.catalog.run(model_id)
    if run is None or run.deleted_at is None:
        raise NotFound(f"model {model_id!r} was not unloaded; send unload_model again")
    return future_responses.finished({"model_id": model_id, "type": "unload_model"})
