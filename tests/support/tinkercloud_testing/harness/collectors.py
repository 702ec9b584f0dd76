"""A collector of OpenTelemetry's spans (OTLP over HTTP)."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until


@dataclass(frozen=True)
class Received:
    """A span, and the name of the program that sent it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        """Name of the span."""
        return self.span.name

    @property
    def attributes(self) -> Mapping[str, object]:
        """The attributes of the span by name."""
        return {
            each.key: getattr(each.value, each.value.WhichOneof("value") or "")
            for each in self.span.attributes
        }


@dataclass
class Collector:
    """What a collector has received."""

    url: str = ""
    status: int = 200
    """Status of its answers; only batches that get 200 are kept."""
    may_answer: Event = field(default_factory=Event)
    """While it is not set, batches wait for their answers."""
    waiting: int = 0
    """Number of batches that wait for their answers."""
    refused: int = 0
    """Number of batches that were refused."""
    bodies: list[bytes] = field(default_factory=list)
    """The batches."""

    @property
    def spans(self) -> list[Received]:
        """All spans, in the order in which they were sent."""
        return [
            Received(_service_of(resource.resource), span)
            for body in list(self.bodies)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def of_trace(self, trace_id: str, *names: str) -> list[Received]:
        """Wait for a span of a trace with each of these names, and return all spans of the trace.

        Args:
            trace_id: the trace, in hexadecimal.
            names: names of spans.
        """

        def own() -> list[Received]:
            return [each for each in self.spans if each.span.trace_id.hex() == trace_id]

        wait_until(lambda: {*names} <= {each.name for each in own()}, f"spans {names}")
        return own()


def _service_of(resource: Resource) -> str:
    attributes = {each.key: each.value.string_value for each in resource.attributes}
    return attributes["service.name"]


@contextlib.contextmanager
def a_collector() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()
    collector.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.waiting += 1
            collector.may_answer.wait(PATIENCE_SECONDS)
            collector.waiting -= 1
            if self.path != "/v1/traces" or collector.status != 200:
                collector.refused += 1
                self.send_error(collector.status if self.path == "/v1/traces" else 404)
                return
            collector.bodies.append(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.shutdown()
        server.server_close()
