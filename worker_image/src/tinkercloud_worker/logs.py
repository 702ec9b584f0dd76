"""Logging of a head's processes: one JSON object per line, on stderr.

Engines use the standard library's `logging`, with details in `extra`, since they may run where only
torch and transformers are installed. All other modules use structlog. Both, and the warnings of
other libraries, have the same output format.

Lines with the field `progress` say how far the head is with loading its model, or with saving its
runs. A local server shows the last one to those who wait.
"""

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


class LossyStream:
    """A text stream whose writes never raise: a full disk must not fail the work that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; drop it if that fails."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, ignoring errors."""
        with suppress(OSError):
            self._stream.flush()


def configure() -> None:
    """Configure logging in this process: own messages from INFO, others from WARNING."""
    output = cast("TextIO", LossyStream(sys.stderr))
    described: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*described, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(output),
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *described],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.getLogger().addHandler(handler)
    logging.getLogger("tinkercloud_worker").setLevel(logging.INFO)
