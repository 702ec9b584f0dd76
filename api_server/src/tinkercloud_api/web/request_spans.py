"""Spans of the requests to this server, for an OpenTelemetry collector."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from opentelemetry.trace import StatusCode

from tinkercloud_protocol.wire import request_ids
from tinkercloud_protocol.wire.asgi import Scope
from tinkercloud_protocol.wire.span_sender import SpanSender, traceparent_of

_PROBES = frozenset({"/healthz", "/livez", "/readyz"})
"""Paths without spans: Kubernetes calls them every few seconds."""


class RequestSpans:
    """Makes spans of requests, with neither keys nor content of requests, queries or results."""

    def __init__(self, endpoint: str) -> None:
        """Start sending spans to the collector at `endpoint`."""
        self._sender = SpanSender(endpoint, "tinkercloud-api", socket.gethostname())

    def close(self) -> None:
        """Send the last spans. Blocks."""
        self._sender.close()

    @contextmanager
    def around(self, scope: Scope, answer: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Make a span of a request, which is served within the context.

        Heads and log lines get its place in the trace, which a client may begin.

        Args:
            scope: the request (ASGI).
            answer: returns the template of its route and the status, once it was served.
        """
        if scope["path"] in _PROBES:
            yield
            return
        given = dict(scope["headers"]).get(request_ids.TRACE_HEADER.encode(), b"")
        span = self._sender.begin(scope["method"], given.decode("latin-1"))
        place = traceparent_of(span)
        placed = {request_ids.TRACE_LOG_FIELD: place} if place is not None else {}
        try:
            with structlog.contextvars.bound_contextvars(**placed):
                yield
        finally:
            route, status = answer()
            span.update_name(f"{scope['method']} {route}")
            named = structlog.contextvars.get_contextvars()
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("http.route", route)
            span.set_attribute("tinkercloud.http_request_id", named[request_ids.LOG_FIELD])
            if (caller := scope.get("principal")) is not None:
                span.set_attribute("tinkercloud.owner", caller.owner)
            if status.isdigit():
                span.set_attribute("http.response.status_code", int(status))
            if status.startswith("5"):
                span.set_status(StatusCode.ERROR)
            span.end()
