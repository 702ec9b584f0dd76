"""Results of requests for clients without an SDK: their state, and forgetting them."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import orjson
from fastapi import APIRouter, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from tinkercloud_api.access.effects import READS, WORKS, declares, names_no_object
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.routes.requests import future_routes
from tinkercloud_api.routes.requests.answers import StateAnswer
from tinkercloud_api.routes.requests.call import Call
from tinkercloud_api.web.asgi_http import HotRequest
from tinkercloud_protocol.heads.head_messages import ForgetResults
from tinkercloud_protocol.responses.listings import CleanupAnswer, FutureState
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.json_model import Name, WireModel

router = APIRouter(prefix="/api/v1", tags=["training and sampling"])


_MAX_AGE_HOURS = 24 * 365


class Cleanup(WireModel):
    """POST cleanup_futures."""

    max_age_hours: Annotated[float, Field(ge=0, le=_MAX_AGE_HOURS)] = 0.0
    """Forget only results that were read at least this long ago."""


class _Streamed(Response):
    """A response that a function sends."""

    def __init__(self, stream: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await self._stream(scope, receive, send)


@router.get("/retrieve_future/{request_id}", response_model=FutureState)
@router.post("/retrieve_future/{request_id}", response_model=FutureState)
@declares(READS)
async def show_future(request_id: Name, server: Server, caller: Caller) -> Response:
    """Return the state of a request, and its result if it has one, without waiting."""
    body = orjson.dumps({"request_id": request_id})

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(server, HotRequest(scope, receive, len(body)), send, caller)
        poll = call.of_own(routes.RETRIEVE_FUTURE, body, StateAnswer(call.send).send)
        await future_routes.retrieve(poll, 0.0)

    return _Streamed(stream)


@router.post("/cleanup_futures")
@declares(WORKS)
@names_no_object
async def cleanup_futures(
    server: Server, caller: Caller, request: Cleanup | None = None
) -> CleanupAnswer:
    """Forget the results of the caller that were delivered, on all of its session heads."""
    seconds = (request or Cleanup()).max_age_hours * 3600
    which = ForgetResults(owner=caller.owner, min_age_seconds=seconds)
    return CleanupAnswer(cleaned_count=await server.shared_heads.forget_results(which))
