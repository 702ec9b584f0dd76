"""Starts the `tinkercloud` command, and loads no more than it needs."""

import os
import sys

import tinkercloud_api.process_start  # noqa: F401 - notes the time
from tinkercloud_api.lasting_objects import lasting_objects
from tinkercloud_api.version_line import version_line


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:
        # The commands take seconds of a small machine to load.
        sys.stdout.write(f"{version_line()}\n")
        return
    if sys.argv[1:2] == ["serve"] and "--help" not in sys.argv:
        _say_that_it_starts()
    with lasting_objects():
        from tinkercloud_api.cli import app  # noqa: PLC0415 - while nothing is collected
    app()


def _say_that_it_starts() -> None:
    """Print the first line of the server, whose program takes seconds of a busy machine to load."""
    # Before the settings are read, which takes part of that time.
    if os.environ.get("TINKERCLOUD_LOG_FORMAT") != "json":
        sys.stderr.write(f"{version_line()}: starting\n")
        sys.stderr.flush()
