"""Helpers for the examples: server address, API key, waiting for the server."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BASE_URL = os.environ.setdefault("TINKER_BASE_URL", "http://127.0.0.1:8000")
# The SDK reads it when it is imported.
os.environ.setdefault("HF_ENDPOINT", f"{BASE_URL}/hf")
MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")


def tinkercloud(*arguments: str) -> str:
    """Run the `tinkercloud` command and return what it printed."""
    command = [str(Path(sys.executable).parent / "tinkercloud"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603


def ensure_key() -> None:
    """Create an API key with the local command if the environment has none."""
    if "TINKER_API_KEY" not in os.environ:
        os.environ["TINKER_API_KEY"] = json.loads(tinkercloud("keys", "create", "demo", "--json"))[
            "key"
        ]


def is_healthy() -> bool:
    """Return whether the server reports that it is healthy."""
    try:
        with urllib.request.urlopen(f"{BASE_URL}/healthz", timeout=5) as response:  # noqa: S310
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def wait_until_healthy(seconds: float = 120) -> None:
    """Wait for the server; print a message if it does not respond at once."""
    deadline = time.monotonic() + seconds
    if not is_healthy():
        print(
            f"Waiting up to {seconds:.0f} s for a server at {BASE_URL} (`make run` starts one) ..."
        )
    while not is_healthy():
        if time.monotonic() > deadline:
            sys.exit(f"No server responds at {BASE_URL}. Start one with `make run`.")
        time.sleep(0.2)
