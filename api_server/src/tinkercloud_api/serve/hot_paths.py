"""The hot paths: dispatch of the requests that are forwarded to session heads as bytes.

Plain ASGI, without FastAPI: bodies are read only as far as routing needs them. The API key and the
ownership of the run or sampling session are checked before anything is sent to a head.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.failed_logins import Throttle
from tinkercloud_api.context import Context
from tinkercloud_api.routes.checkpoints import importing
from tinkercloud_api.routes.models import chat_routes
from tinkercloud_api.routes.requests import (
    blocking,
    future_routes,
    sampling_routes,
    training_routes,
)
from tinkercloud_api.routes.requests.call import Call, Handler
from tinkercloud_api.routes.requests.rejections import reject_in_sequence, reject_unknown_call
from tinkercloud_api.transfers import upload_urls
from tinkercloud_api.web.asgi_http import (
    DISCARD,
    DISCARD_WITHOUT_KEY,
    HotRequest,
    drain_body,
    key_of,
    reject_duplicate_headers,
    respond_error,
)
from tinkercloud_api.web.error_handlers import allowed_methods
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send, error_headers, respond
from tinkercloud_protocol.wire.errors import MethodNotAllowed, Unauthenticated, WireError

log = structlog.get_logger(__name__)

_WITHOUT_KEY = {"/api/v1/healthz"}
"""API paths that need no key, in addition to all paths outside the API: probes, the tokenizer
mirror and the OpenAPI document."""
_WITH_KEY = (routes.PREFIX, *chat_errors.PREFIXES)
"""Prefixes of the paths that need a key."""
_UPLOADS = (importing.UPLOADS, upload_urls.PREFIX)
"""Prefixes of the paths to which files are uploaded, with a key or by a signed URL."""

HANDLERS: Mapping[str, Handler] = {
    routes.FORWARD_BACKWARD: training_routes.forward_backward,
    routes.FORWARD: training_routes.in_order(training_routes.forward_in_order),
    routes.OPTIM_STEP: training_routes.in_order(training_routes.forward_in_order),
    routes.SAVE_WEIGHTS: training_routes.in_order(training_routes.save_weights),
    routes.SAVE_WEIGHTS_FOR_SAMPLER: training_routes.in_order(
        training_routes.save_weights_for_sampler
    ),
    routes.SAVE_WEIGHTS_EXTERNAL: training_routes.in_order(training_routes.save_weights_external),
    routes.LOAD_WEIGHTS: training_routes.in_order(training_routes.load_weights),
    routes.ATTACH_MODEL: training_routes.in_order(training_routes.forward_in_order),
    routes.ASAMPLE: sampling_routes.asample,
    routes.SAMPLE: blocking.sample,
    routes.RETRIEVE_FUTURE: future_routes.retrieve_future,
    routes.CANCEL_FUTURE: future_routes.cancel_future,
}


class HotPaths:
    """ASGI middleware that authenticates every request and serves the hot paths itself.

    A dictionary lookup dispatches to the handlers: the framework's own routing costs more than all
    that they do. All other requests are passed on to the application.
    """

    def __init__(
        self, app: ASGIApp, server: Callable[[], Context], routed: Sequence[BaseRoute]
    ) -> None:
        """Wrap an application.

        Args:
            app: serves all other paths.
            server: returns the server's components, which exist once the server is running.
            routed: the application's routes.
        """
        self._app = app
        self._server = server
        self._routed = routed
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._authenticate(scope)
        except WireError as error:
            _, send = drain_body(scope, receive, send, DISCARD_WITHOUT_KEY)
            # Connections of callers without a valid key are not kept open. When the SDK reads this
            # challenge (RFC 6750), it exchanges its key for another token.
            headers = {"connection": "close"}
            if isinstance(error, Unauthenticated):
                headers["www-authenticate"] = 'Bearer error="invalid_token"'
            await _respond_error(scope, send, error, headers)
            return
        discard = DISCARD_WITHOUT_KEY if principal is None else DISCARD
        receive, send = drain_body(scope, receive, send, discard)
        if principal is not None:
            try:
                principal = principal.requesting(scope["method"], scope["path"])
                scope["principal"] = principal
                send = await self._server().auditing.recorded(principal, scope, send)
            except WireError as error:
                await _respond_error(scope, send, error)
                return
        handler = self._handler(scope)
        if handler is None or principal is None:
            _declare_json(scope)
            await self._app(scope, receive, send)
            return
        call = Call(self._server(), HotRequest(scope, receive), send, principal)
        try:
            await handler(call)
        except WireError as error:
            await _respond_error(scope, send, error)
        except Exception:
            log.exception("unexpected error while handling a request", path=call.request.path)
            if call.has_answered:
                raise
            await _respond_error(scope, send, WireError(chat_errors.INTERNAL_ERROR))

    async def _authenticate(self, scope: Scope) -> Principal | None:
        """Return the caller, or None for paths that need no key, without reading the body.

        Raises:
            InvalidRequest: a header was sent more than once, or two headers contain different keys.
            Unauthenticated: the key is missing, unknown or revoked.
            InvalidSignature: a signed URL was changed; UrlGone if it has expired.
            Overloaded: too many unknown keys came from the same address.
        """
        reject_duplicate_headers(scope["headers"])
        path: str = scope["path"]
        if scope["method"] == "PUT" and path.startswith(upload_urls.PREFIX):
            return importing.url_holder(self._server(), scope)
        if not path.startswith(_WITH_KEY) or path in _WITHOUT_KEY:
            return None
        authenticator = self._server().authenticator
        key = key_of(scope["headers"])
        address = (scope.get("client") or ("",))[0]
        if key is None or authenticator.has_known(key):
            return await authenticator.principal(key)
        return await self._throttle.holder(address, lambda: authenticator.principal(key))

    def _handler(self, scope: Scope) -> Handler | None:
        """Return the handler of a hot path, or None for requests that the application serves."""
        path: str = scope["path"]
        if path.startswith(chat_errors.PREFIXES):
            return chat_routes.serve
        if scope["method"] == "PUT" and path.startswith(_UPLOADS):
            return importing.receive_file
        if path in HANDLERS:
            return HANDLERS[path] if scope["method"] == "POST" else _reject_method
        if scope["method"] != "POST" or not path.startswith(routes.PREFIX):
            return None
        allowed = allowed_methods(self._routed, scope)
        if "POST" in allowed:
            return None
        return partial(_reject_post, allowed=allowed) if allowed else reject_unknown_call


async def _reject_method(call: Call) -> None:
    raise MethodNotAllowed(call.request.method, call.request.path, ["POST"])


async def _reject_post(call: Call, allowed: Collection[str]) -> None:
    await reject_in_sequence(call, MethodNotAllowed("POST", call.request.path, allowed))


async def _respond_error(
    scope: Scope, send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send the response to an error, in the shape that clients of the path expect."""
    path: str = scope["path"]
    if not path.startswith(chat_errors.PREFIXES):
        await respond_error(send, error, headers)
        return
    body, fields = chat_errors.error_bytes(path, error), error_headers(error)
    await respond(send, body, status=error.status, headers={**fields, **(headers or {})})


def _declare_json(scope: Scope) -> None:
    """Declare the body of a request as JSON, if `curl -d` has declared it as a form.

    In the scope itself, in which middleware outside this one looks for the route.
    """
    fields = dict(scope["headers"])
    if future_responses.is_json(fields.get(b"content-type", b"").decode("latin-1")):
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", future_responses.JSON.encode())]
