"""All log lines are JSON objects of the same format, from any logging library."""

import json
import subprocess
import sys
from typing import Any

PROGRAM = """
import logging
import structlog
from tinkercloud_worker import logs

logs.configure()
structlog.contextvars.bind_contextvars(head="h", generation="g")
log = structlog.get_logger("tinkercloud_worker.head")
log.warning("slow", missing=["Triton"])
log.info("shown")
log.debug("hidden")
engine = logging.getLogger("tinkercloud_worker.model.fused_kernels")
engine.warning("slow", extra={"missing": ["Triton"]})
engine.info("shown")
engine.debug("hidden")
logging.getLogger("asyncio").info("hidden")
logging.getLogger("asyncio").warning("of %s", "others")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("tinkercloud_worker.head").exception("failed")
    engine.exception("failed")
"""


def test_standard_library_logs_have_the_same_format_as_structlog() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )

    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line.pop("timestamp")[-1] for line in lines] == ["Z"] * len(lines)
    slow, shown, engine_slow, engine_shown, others, failed, engine_failed = lines
    assert (
        slow
        == engine_slow
        == {
            "head": "h",
            "generation": "g",
            "level": "warning",
            "event": "slow",
            "missing": ["Triton"],
        }
    )
    assert (
        shown
        == engine_shown
        == {
            "head": "h",
            "generation": "g",
            "level": "info",
            "event": "shown",
        }
    )
    assert others["event"] == "of others"
    assert "ZeroDivisionError" in failed["exception"]
    assert failed == engine_failed
