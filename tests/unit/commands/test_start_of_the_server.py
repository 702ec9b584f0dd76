"""`tinkercloud serve` says what it does before it serves."""

import subprocess
import sys
from pathlib import Path

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
