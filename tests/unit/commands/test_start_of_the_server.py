"""`tinkercloud serve` says what it does before it serves."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_api.config import state_folder

SERVE = """
import sys
from tinkercloud_api import cli
from tinkercloud_api.commands.common import progress

progress._LINE_SECONDS = progress._SHORTEST_SECONDS = 0.0
state_dir, host, port = sys.argv[1:]
options = ["--host", host, "--port", port, "--state-dir", state_dir]
try:
    cli.app(["serve", "--model", f"a={state_dir}/missing", *options])
finally:
    print("uvicorn" in sys.modules)
"""
"""Ends before it serves, as there is no model; prints whether the program was loaded."""


def started(state_dir: Path, host: str, port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SERVE, str(state_dir), host, str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_start_that_takes_long_says_what_it_does(tmp_path: Path) -> None:
    result = started(tmp_path, "127.0.0.1", 0)

    assert (result.returncode, result.stdout) == (1, "True\n")
    assert result.stderr.startswith("loading the server's program, for 0 s\n")


def test_an_address_that_is_not_available_is_named_before_the_program_is_loaded(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = started(tmp_path, "127.0.0.1", port)
    # An address of documentation, which is not of this machine.
    foreign = started(tmp_path, "192.0.2.1", port)

    for result, where, option in (
        (taken, f"127.0.0.1:{port}", "--port"),
        (foreign, f"192.0.2.1:{port}", "--host"),
    ):
        assert (result.returncode, result.stdout) == (1, "False\n")
        assert f"cannot listen on {where}" in result.stderr
        assert option in result.stderr


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


def test_others_on_the_machine_cannot_read_the_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"

    state_folder.make(folder)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
