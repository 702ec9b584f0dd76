"""`tinkercloud serve` says what it does before it serves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = """
import sys
from tinkercloud_api import cli
from tinkercloud_api.commands.common import progress

progress._LINE_SECONDS = 0.0
cli.app(["serve", "--host", "192.0.2.1", "--state-dir", sys.argv[1]])
"""
"""Ends before it serves: the address, of documentation, is not of this machine."""


def test_a_start_that_takes_long_says_what_it_does(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert "cannot listen on 192.0.2.1" in result.stderr
    assert result.stderr.startswith("loading the server's program, for 0 s\n")


ENTER = """
import builtins, sys
from tinkercloud_api.entry import main

def refuse(name, *arguments, **options):
    if name.startswith("tinkercloud_api.cli"):
        raise SystemExit(0)
    return load(name, *arguments, **options)

load, builtins.__import__ = builtins.__import__, refuse
sys.argv = ["tinkercloud", *sys.argv[1:]]
main()
"""
"""Ends where the commands would be loaded."""


@pytest.mark.parametrize(
    ("arguments", "log_format", "expected"),
    [
        (["serve", "--port=0"], "console", r"tinkercloud \d[.\d]*: starting\n"),
        (["serve"], "json", ""),
        (["serve", "--help"], "console", ""),
        (["keys", "list"], "console", ""),
    ],
)
def test_only_a_server_says_that_it_starts_before_its_program_is_loaded(
    arguments: list[str], log_format: str, expected: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ENTER, *arguments],
        env={**os.environ, "TINKERCLOUD_LOG_FORMAT": log_format},
        capture_output=True,
        text=True,
        check=False,
    )

    assert re.fullmatch(expected, result.stderr), result.stderr
    assert result.returncode == 0
