"""Names of HTTP requests, by which a user and an operator can speak about the same one.

The API server names each request, and returns the name in its response. It is in every log line
that the request causes, here and at its session head, and in the trace of its session.

If spans are sent to OpenTelemetry (`span_sender`), a request also has a place in a trace there (W3C
Trace Context), which heads and log lines get in the same way.
"""

import re
import uuid

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
"""The same for clients of Anthropic's API."""
LOG_FIELD = "http_request_id"
"""Name of the field of log lines; `request_id` is that of futures."""
TRACE_HEADER = "traceparent"
"""Names the trace of OpenTelemetry and the span that caused a request."""
TRACE_LOG_FIELD = "traceparent"
"""Name of the field of log lines with the same content."""
_ACCEPTED = re.compile(r"[A-Za-z0-9._-]{1,128}")


def name_of(given: str) -> str:
    """Return the name of a request.

    Args:
        given: the name that the client has sent, or "". One with other characters than letters,
            digits, ".", "_" and "-", or longer than 128 of them, is ignored.
    """
    return given if _ACCEPTED.fullmatch(given) else f"req_{uuid.uuid4().hex}"
