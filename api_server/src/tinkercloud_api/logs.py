"""Structured logs: one event a line, for people at a terminal or for machines."""

import io
import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from tinkercloud_api.settings import Settings

_QUIET_SECONDS = 60.0
"""In which a warning of the HTTP server is logged once: anybody can cause one with each request."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Control characters, among them those that begin a terminal's commands."""
_ESCAPED_IN_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}


def escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters in what is logged, some of which clients send (a processor)."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = value.translate(_ESCAPED_IN_LINES if name == "event" else _ESCAPED)
    return event


def _plain_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    # Plain: the default ones show local variables, and with them keys.
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(text.getvalue().translate(_ESCAPED_IN_LINES))


class WarningRateLimit(logging.Filter):
    """Lets each warning through once in a while, and says how many of its kind came meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is to be logged."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        if self._clock() < self._begun.get(kind, float("-inf")) + _QUIET_SECONDS:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._begun[kind] = self._clock()
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{kind} ({left_out} more since the last line)"
        return True


def configure(settings: Settings) -> None:
    """Send every log line, the libraries' too, through structlog to standard error."""
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if settings.log_format == "json":
        final: list[structlog.types.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        final = [
            escape_controls,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=_plain_traceback
            ),
        ]
    structlog.configure(
        processors=[*processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=processors,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    http_server = logging.getLogger("uvicorn.error")
    for earlier in [each for each in http_server.filters if isinstance(each, WarningRateLimit)]:
        http_server.removeFilter(earlier)
    http_server.addFilter(WarningRateLimit())
    for chatty in ("aiosqlite", "alembic", "asyncio", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
