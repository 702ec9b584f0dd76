"""Client input can neither control a terminal nor flood the log."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tinkercloud_api.config import api_logs
from tinkercloud_api.config.settings import Settings

CLEAR_SCREEN = "\x1b[2J"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_control_characters_are_escaped_everywhere(
    log_format: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    api_logs.configure(Settings(state_dir=tmp_path, log_format=log_format))
    log = structlog.stdlib.get_logger("tinkercloud_api.test")

    log.info("reported", error_message=CLEAR_SCREEN, listed=[CLEAR_SCREEN], line="a\nforged\rb")
    log.info(f"an event {CLEAR_SCREEN}\x07\x9b2J")
    logging.getLogger("another.library").warning("said %s", CLEAR_SCREEN)
    log.error("failed", exc_info=ValueError(CLEAR_SCREEN))

    written = capfd.readouterr().err
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(written)
    assert written.count("[2J") == 5
    assert "\nforged" not in written


def test_a_warning_that_any_client_can_cause_is_logged_once_a_minute_with_a_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = 0.0
    seldom = api_logs.WarningRateLimit(clock=lambda: moment)
    logger = logging.getLogger("uvicorn.error.of.this.test")
    logger.addFilter(seldom)
    api_logs.configure(Settings(state_dir=tmp_path))

    for moment in (0.0, 1.0, 59.0, 60.0, 61.0):
        logger.warning("Invalid HTTP request received.")
        logger.warning("Unsupported upgrade request.")
        logger.error("something else is wrong at %s", moment)

    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "Invalid HTTP request received." in line]) == 2
    assert len([line for line in lines if "Unsupported upgrade request." in line]) == 2
    assert len([line for line in lines if "(2 similar warnings suppressed)" in line]) == 2
    assert len([line for line in lines if "something else" in line]) == 5
