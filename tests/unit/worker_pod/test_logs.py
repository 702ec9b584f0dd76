"""Whatever library a part of a head logs with, a line is one JSON object of the same form."""

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
log.info("told")
log.debug("not told")
engine = logging.getLogger("tinkercloud_worker.model.fused_kernels")
engine.warning("slow", extra={"missing": ["Triton"]})
engine.info("told")
engine.debug("not told")
logging.getLogger("asyncio").info("not told")
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
    slow, told, engine_slow, engine_told, others, failed, engine_failed = lines
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
        told
        == engine_told
        == {
            "head": "h",
            "generation": "g",
            "level": "info",
            "event": "told",
        }
    )
    assert others["event"] == "of others"
    assert "ZeroDivisionError" in failed["exception"]
    assert failed == engine_failed
