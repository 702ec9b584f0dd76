"""Sends spans of requests to an OpenTelemetry collector (OTLP over HTTP).

Needs the extra `telemetry`. Only programs that send spans import this module: OpenTelemetry takes
0.2 seconds and 8 MB.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinkercloud_protocol.wire import request_ids

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 3.0
"""Longest time for sending the last spans."""
_CONTEXT = TraceContextTextMapPropagator()
_NANOSECONDS = 1_000_000_000

Attributes = Mapping[str, str | int]


class SpanSender:
    """Sends the spans of one process, in batches and in a thread of its own.

    It never blocks its callers, and never fails: if the collector is away, slow or refuses, at most
    2048 spans wait, and the oldest are dropped. The variables `OTEL_BSP_*`, `OTEL_TRACES_SAMPLER`
    and `OTEL_EXPORTER_OTLP_*` of OpenTelemetry's SDK apply.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Create a sender; this starts its thread.

        Args:
            endpoint: address of the collector (`launch.OtlpEndpoint`).
            service: name of the program.
            instance: which of the processes of that program this is.
        """
        named = {"service.name": service, "service.instance.id": instance}
        # Not the global one: libraries would send spans too, with what nobody has checked.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._exporter = _Exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tinkercloud")

    def begin(self, name: str, parent: str | None) -> Span:
        """Return the span of a request that this process starts to serve; the caller ends it.

        Args:
            name: name of the span.
            parent: `traceparent` of the caller; None or a malformed one begins a new trace.
        """
        return self._tracer.start_span(name, _context_of(parent), SpanKind.SERVER)

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        *,
        attributes: Attributes,
        error: BaseException | None = None,
    ) -> str | None:
        """Send a span of something that is over.

        Args:
            name: name of the span.
            parent: `traceparent` of the request.
            start: when it began, in seconds from 1970-01-01 in UTC.
            end: when it ended.
            attributes: what else is known.
            error: why it failed, if it did. Its message may quote the client's data and is not
                sent.

        Returns:
            The `traceparent` for what was a part of it; None if OpenTelemetry's SDK is disabled.
        """
        context, started = _context_of(parent), int(start * _NANOSECONDS)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=started)
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
        span.end(int(end * _NANOSECONDS))
        return traceparent_of(span)

    def close(self) -> None:
        """Send the spans that wait, as far as the collector takes them within 3 seconds. Blocks."""
        if self._exporter.is_failing:
            self._exporter.shutdown()
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def traceparent_of(span: Span) -> str | None:
    """Return the `traceparent` for what a span causes; None if OpenTelemetry's SDK is disabled."""
    carrier: dict[str, str] = {}
    _CONTEXT.inject(carrier, set_span_in_context(span))
    return carrier.get(request_ids.TRACE_HEADER)


def _context_of(parent: str | None) -> Context:
    return _CONTEXT.extract({request_ids.TRACE_HEADER: parent or ""}, Context())


class _Exporter(SpanExporter):
    """Sends batches, and logs one line when the collector stops accepting them."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._to_collector = trace_exporter.OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._reason = _Reason()
        self.is_failing = False
        """Whether the collector has not accepted the last batch."""
        # It logs each attempt, and each span that is dropped.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        attempts = logging.getLogger(trace_exporter.__name__)
        attempts.setLevel(logging.WARNING)
        attempts.addFilter(self._reason)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._reason.text = ""
        result = self._to_collector.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed and not self.is_failing:
            log.warning(
                "spans are dropped until the OpenTelemetry collector at %s accepts them: %s",
                self._endpoint,
                self._reason.text,
            )
        self.is_failing = has_failed
        return result

    def shutdown(self) -> None:
        """Cancel what is being sent."""
        self._to_collector.shutdown()  # type: ignore[no-untyped-call]


class _Reason(logging.Filter):
    """Keeps the first message instead of logging it."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False."""
        self.text = self.text or record.getMessage()
        return False
