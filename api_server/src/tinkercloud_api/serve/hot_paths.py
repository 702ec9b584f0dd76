"""The hot paths: dispatch of the requests that are forwarded to session heads as bytes.

Plain ASGI, without FastAPI: bodies are read only as far as routing needs them. The API key and the
ownership of the run or sampling session are checked before anything is sent to a head.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import WORKS
from tinkercloud_api.access.failed_logins import Throttle
from tinkercloud_api.console.pages import failure, look_up_session
from tinkercloud_api.context import Context
from tinkercloud_api.providers.head_http_client import HeadUnreachable
from tinkercloud_api.routes.checkpoints import importing
from tinkercloud_api.routes.models import chat_routes
from tinkercloud_api.routes.requests.call import Call, Handler
from tinkercloud_api.routes.requests.rejections import reject_in_sequence, reject_unknown_call
from tinkercloud_api.serve.hot_routes import BATCH, EXACT_PATHS, HotRoute, routes_at
from tinkercloud_api.serve.route_table import Authentication, Effects, authentication_of, table
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
from tinkercloud_protocol.wire.asgi import Message, Receive, Scope, Send, error_headers, respond
from tinkercloud_protocol.wire.errors import (
    MethodNotAllowed,
    Unauthenticated,
    Unavailable,
    WireError,
)

log = structlog.get_logger(__name__)


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
        self._effects = Effects(table(routed))

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
        served = routes_at(scope["path"])
        if principal is not None:
            try:
                effect = self._effects.of(scope["method"], scope["path"], served.by_method)
                principal = principal.requesting(scope["method"], scope["path"], effect)
                scope["principal"] = principal
                send = await self._server().auditing.recorded(effect, principal, scope, send)
            except WireError as error:
                await _respond_error(scope, send, error)
                return
        route = self._route(scope, served.by_method)
        if route is None or principal is None:
            _declare_json(scope)
            await self._app(scope, receive, send)
            return
        server = self._server()
        request = HotRequest(scope, receive, route.limit.max_bytes(server.settings))
        call = Call(server, request, send, principal, served.recorded)
        await _handle(scope, route, call)

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
        authentication = authentication_of(path)
        if scope["method"] == "PUT" and path.startswith(upload_urls.PREFIX):
            return importing.url_holder(self._server(), scope)
        if authentication is Authentication.BROWSER:
            return await self._browser(scope)
        if authentication is not Authentication.KEY:
            return None
        authenticator = self._server().authenticator
        key = key_of(scope["headers"])
        address = (scope.get("client") or ("",))[0]
        is_limited = authentication.limits_failed_logins
        if not is_limited or key is None or authenticator.has_known(key):
            return await authenticator.principal(key)
        return await self._throttle.holder(address, lambda: authenticator.principal(key))

    async def _browser(self, scope: Scope) -> Principal | None:
        """Return whose key opened the session of a browser; None if it has none."""
        session = await look_up_session(scope, self._server().browsers)
        return None if session is None else session.caller

    def _route(self, scope: Scope, served: Mapping[str, HotRoute]) -> HotRoute | None:
        """Return the route of a request, or None for requests that the application serves."""
        method: str = scope["method"]
        path: str = scope["path"]
        if (route := served.get(method)) is not None:
            return route
        if path.startswith(chat_errors.PREFIXES):
            if served:
                return _rejecting(scope, partial(_reject_method, allowed=served))
            return _rejecting(scope, chat_routes.reject_unknown)
        if path in EXACT_PATHS:
            return _rejecting(scope, partial(_reject_method, allowed=served))
        if method != "POST" or not path.startswith(routes.PREFIX):
            return None
        allowed = allowed_methods(self._routed, scope)
        # A call of another API below a wrong base URL gets an error in the shape of that API.
        is_foreign = not allowed and path.endswith(chat_errors.CALLS)
        if "POST" in allowed or is_foreign:
            return None
        if allowed:
            return _rejecting(scope, partial(_reject_post, allowed=allowed))
        return _rejecting(scope, reject_unknown_call)


def _rejecting(scope: Scope, handler: Handler) -> HotRoute:
    """Return the route of a request that is rejected; its body may name a place in an order."""
    return HotRoute(scope["method"], scope["path"], BATCH, WORKS, handler)


async def _reject_method(call: Call, allowed: Collection[str]) -> None:
    raise MethodNotAllowed(call.request.method, call.request.path, allowed)


async def _reject_post(call: Call, allowed: Collection[str]) -> None:
    await reject_in_sequence(call, MethodNotAllowed("POST", call.request.path, allowed))


async def _handle(scope: Scope, route: HotRoute, call: Call) -> None:
    """Run the handler of a request, and respond to what it raises."""
    try:
        await route.handler(call)
    except WireError as error:
        await _respond_error(scope, call.raw_send, error)
    except HeadUnreachable as error:
        # Without a response yet, the proxy has made it Unavailable.
        log.warning("a session head broke off", path=call.request.path, error=str(error))
        await _break_off(scope, call, "the session head stopped in the middle of its answer")
    except asyncio.CancelledError:
        # The server waits some seconds for requests when it stops, and cancels the others.
        if not call.server.long_polls.is_stopping:
            raise
        await _break_off(scope, call, "the server is stopping")
    except Exception:
        log.exception("unexpected error while handling a request", path=call.request.path)
        if call.has_answered:
            raise
        await _respond_error(scope, call.raw_send, WireError(chat_errors.INTERNAL_ERROR))


async def _break_off(scope: Scope, call: Call, reason: str) -> None:
    """End a response, which may have started, with an error, if its format has one for that."""
    error = Unavailable(f"{reason}; send the request again")
    if not call.has_answered:
        await _respond_error(scope, call.send, error)
    elif call.is_stream:
        event = chat_errors.error_event(call.request.path, error)
        await call.send({"type": "http.response.body", "body": event})


async def _respond_error(
    scope: Scope, send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send the response to an error, in the shape that clients of the path expect."""
    path: str = scope["path"]
    if authentication_of(path) is Authentication.BROWSER:
        page = await failure(error.message, error.status, scope["method"])
        await page(scope, _nothing_to_receive, send)
        return
    if not path.startswith(chat_errors.PREFIXES):
        await respond_error(send, error, headers)
        return
    body, fields = chat_errors.error_bytes(path, error), error_headers(error)
    await respond(send, body, status=error.status, headers={**fields, **(headers or {})})


async def _nothing_to_receive() -> Message:
    return {"type": "http.disconnect"}


def _declare_json(scope: Scope) -> None:
    """Declare the body of a request as JSON, if `curl -d` has declared it as a form.

    In the scope itself, in which middleware outside this one looks for the route.
    """
    fields = dict(scope["headers"])
    if future_responses.is_json(fields.get(b"content-type", b"").decode("latin-1")):
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", future_responses.JSON.encode())]
