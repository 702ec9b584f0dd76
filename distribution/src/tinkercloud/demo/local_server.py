"""The server that the demo uses: waiting for it, a key for it, and its restart."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tinkercloud_api.config import state_folder

_START_SECONDS = 120.0


def ensure_key(state_dir: Path) -> None:
    """Create an API key in the local catalog if the environment has none.

    Args:
        state_dir: the server's state folder.
    """
    if "TINKER_API_KEY" in os.environ:
        return
    command = [sys.executable, "-m", "tinkercloud_api", "keys", "create", "demo", "--json"]
    made = subprocess.run(  # noqa: S603 - our own command
        [*command, "--state-dir", str(state_dir)], stdout=subprocess.PIPE, check=False
    )
    if made.returncode != 0:
        sys.exit("No API key: set TINKER_API_KEY to one of the server's.")
    os.environ["TINKER_API_KEY"] = json.loads(made.stdout)["key"]


def console_link(run: str) -> str:
    """Return a link that opens the page of a run in a browser; empty if there is none."""
    command = [sys.executable, "-m", "tinkercloud_api", "console", "--run", run]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own command
    return made.stdout.strip()


def wait_until_healthy(url: str) -> None:
    """Wait up to two minutes for the server; print a message if it does not respond at once.

    Args:
        url: its URL.

    Raises:
        SystemExit: it does not respond; the message says how to start one.
    """
    deadline = time.monotonic() + _START_SECONDS
    if not _is_healthy(url):
        print(f"Waiting up to {_START_SECONDS:.0f} s for a server at {url} ...")
    while not _is_healthy(url):
        if time.monotonic() > deadline:
            sys.exit(
                f"No server responds at {url}. Start one with `tinkercloud serve --model NAME` in"
                " another terminal, or set TINKER_BASE_URL."
            )
        time.sleep(0.2)


def restart(url: str, state_dir: Path) -> bool:
    """Restart the local server and its session heads, and wait for it.

    Args:
        url: its URL.
        state_dir: its state folder.

    Returns:
        False if the server at the URL does not use the folder and was not restarted.
    """
    server = state_folder.running_server(state_dir)
    if server is None or server.url != url:
        return False
    os.kill(server.pid, signal.SIGHUP)
    while _is_healthy(url):
        time.sleep(0.05)
    wait_until_healthy(url)
    return True


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as response:  # noqa: S310 - the user's
            return int(response.status) == 200
    except (OSError, urllib.error.URLError):
        return False
