"""`tinkercloud logs --follow`: a head's log while it is written."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tinkercloud_api.providers.local.head_folder import folder_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = folder_of(tmp_path, "m") / "head.log"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"line {index}\n" for index in range(5)))
    return file


@pytest.fixture
def following(tmp_path: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    assert log.exists()
    command = ["logs", "m", "--lines", "2", "--follow", "--state-dir", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "tinkercloud_api", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    output: IO[str] | None = process.stdout
    assert output is not None
    return output.readline()


def append(file: Path, text: str) -> None:
    with file.open("a") as log:
        log.write(text)


def test_a_followed_log_is_printed_as_it_grows_until_ctrl_c(
    log: Path, following: subprocess.Popen[str]
) -> None:
    assert next_line(following) == "line 3\n"
    assert next_line(following) == "line 4\n"
    append(log, "a step\n")
    assert next_line(following) == "a step\n"
    following.send_signal(signal.SIGINT)

    assert following.wait() == 0
    assert next_line(following) == ""


def test_the_log_of_the_next_head_is_followed_too(
    log: Path, following: subprocess.Popen[str]
) -> None:
    assert next_line(following) == "line 3\n"
    assert next_line(following) == "line 4\n"
    append(log, "the last words\n")
    log.replace(log.with_name("head.log.1"))
    log.write_text("another head\n")

    assert next_line(following) == "the last words\n"
    assert next_line(following) == "another head\n"


def test_a_log_that_logrotate_has_truncated_is_followed_from_its_start(
    log: Path, following: subprocess.Popen[str]
) -> None:
    assert next_line(following) == "line 3\n"
    assert next_line(following) == "line 4\n"
    with log.open("r+") as rotated:
        rotated.truncate(0)
    append(log, "after it\n")

    assert next_line(following) == "after it\n"
