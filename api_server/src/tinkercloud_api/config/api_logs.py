"""Structured logging: one event per line, as text for a terminal or as JSON."""

import io
import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from tinkercloud_api.config.settings import Settings

_QUIET_SECONDS = 60.0
"""Interval at which each kind of HTTP server warning is logged; any client can provoke one."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Control characters, including those that start terminal escape sequences."""
_ESCAPED_IN_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}


def escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters in log events, which may contain client input (a processor)."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = value.translate(_ESCAPED_IN_LINES if name == "event" else _ESCAPED)
    return event


def _plain_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    # The default formatters show local variables, which may contain API keys.
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(text.getvalue().translate(_ESCAPED_IN_LINES))


class WarningRateLimit(logging.Filter):
    """Limits the rate of each kind of warning, and reports how many were suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last_logged: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        if self._clock() < self._last_logged.get(kind, float("-inf")) + _QUIET_SECONDS:
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return False
        self._last_logged[kind] = self._clock()
        if suppressed := self._suppressed.pop(kind, 0):
            record.msg = f"{kind} ({suppressed} similar warnings suppressed)"
        return True


def configure(settings: Settings) -> None:
    """Send all log records, including those of libraries, through structlog to standard error."""
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
    for verbose in ("aiosqlite", "alembic", "asyncio", "uvicorn.access"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    # It logs each attempt of a request; errors of downloads sum them up.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
