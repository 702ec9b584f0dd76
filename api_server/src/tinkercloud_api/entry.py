"""Starts the `tinkercloud` command, and loads no more than it needs."""

import gc
import sys

from tinkercloud_api.version_line import version_line


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:
        # The commands take seconds of a small machine to load.
        sys.stdout.write(f"{version_line()}\n")
        return
    # Imported modules are never freed; collecting them took an eighth of the startup time.
    gc.disable()
    from tinkercloud_api.cli import app  # noqa: PLC0415 - after the garbage collector is disabled

    gc.freeze()
    gc.enable()
    app()
