"""What the processes of a head log: one JSON object a line, on stderr.

Engines log by the standard library's `logging`, details in `extra`, as they run where nothing but
torch and transformers is installed; all else by structlog. Both come out in the same form, and so
do warnings of other libraries.
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
        """Write what can be written; drop the rest."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError):
            self._stream.flush()


def configure() -> None:
    """Have this process log so: what is ours from INFO on, what is others' from WARNING on."""
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
