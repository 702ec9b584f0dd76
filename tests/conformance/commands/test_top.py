"""`tinkercloud top`, in a terminal and without one, with a running server."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server

MODEL = "tiny/llama"
TINKERCLOUD = (sys.executable, "-m", "tinkercloud_api")
COMMAND = (*TINKERCLOUD, "top")


def environment(server: Server) -> dict[str, str]:
    user = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "TERM": "xterm"}
    return {**server.environment(), **user, "COLUMNS": "200", "LINES": "30"}


def printed(server: Server, *arguments: str) -> str:
    """Return what the command prints without a terminal."""
    return subprocess.check_output([*COMMAND, *arguments], env=environment(server), text=True)


class Screen:
    """The command in a terminal."""

    def __init__(self, server: Server, **variables: str) -> None:
        self._controller, terminal = pty.openpty()
        self.process = subprocess.Popen(
            COMMAND,
            env={**environment(server), **variables},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)

    def wait_for(self, pattern: str) -> None:
        """Wait until the terminal shows what matches a pattern after what was waited for before."""
        shown, ends_at = "", time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, shown):
            assert time.monotonic() < ends_at, shown[-10_000:]
            assert select.select([self._controller], [], [], PATIENCE_SECONDS)[0], shown
            shown += os.read(self._controller, 1 << 16).decode(errors="replace")

    def rest(self) -> str:
        """Wait until the command has ended, and return what it still showed."""
        shown = b""
        try:
            while part := os.read(self._controller, 1 << 16):
                shown += part
        except OSError:  # on Linux, the end of a terminal
            pass
        os.close(self._controller)
        self.process.wait(PATIENCE_SECONDS)
        return shown.decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server that may be stopped."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}) as running:
        yield running


def test_without_a_terminal_the_state_is_printed_once(server: Server) -> None:
    training = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
    loss = step(training) / 4

    path = f"/api/v1/runs/{training.model_id}/curve"
    wait_until(lambda: server.request("GET", path).json()["points"], "the loss of the step")
    found = json.loads(printed(server, "--json"))
    text = printed(server)

    (run,) = found["runs"]
    assert (run["run_id"], run["step"], run["state"]) == (training.model_id, 1, "live")
    assert run["loss"]["mean"] == pytest.approx(loss)
    assert [model["model_name"] for model in found["base_models"]] == [MODEL]
    # The disk of the machine may be nearly full.
    assert [each for each in found["problems"] if each["kind"] != "disk"] == []
    assert f"runs: 1, problems: {len(found['problems'])}" in text
    for part in (training.model_id, MODEL, f"{loss:.5g}", "ready"):
        assert part in text


def test_runs_are_compared_by_the_steps_that_each_has_taken(server: Server) -> None:
    client = server.client()
    made = [client.create_lora_training_client(MODEL, rank=4, seed=2).result() for _ in "ab"]
    losses = [[step(made[0]) / 4, step(made[0]) / 4], [step(made[1]) / 4]]
    command = [*TINKERCLOUD, "runs", "compare", *(each.model_id for each in made)]

    def listed() -> list[str]:
        shown = subprocess.check_output(command, env=environment(server), text=True)
        return shown.splitlines()

    wait_until(lambda: len(listed()) == 3, "the losses of both")
    heading, first, second = (line.split() for line in listed())

    assert first == ["1", f"{losses[0][0]:.5g}", f"{losses[1][0]:.5g}"]
    assert second == ["2", f"{losses[0][1]:.5g}"]
    assert heading == ["step", *(each.model_id for each in made)]


def test_a_terminal_shows_a_server_that_leaves_and_returns_until_ctrl_c(server: Server) -> None:
    screen = Screen(server)
    screen.wait_for("ready")

    server.stop()
    screen.wait_for("trying again")
    server.start()
    screen.wait_for(r"\d\d:\d\d:\d\dZ +\r?\n")
    screen.process.send_signal(signal.SIGINT)

    # The terminal shows what it did before the command, with its cursor.
    assert {"\x1b[?1049l", "\x1b[?25h"} <= set(screen.rest().replace("\x1b", " \x1b").split())
    assert screen.process.returncode == 0


def test_a_rejected_key_ends_the_view_with_its_error(server: Server) -> None:
    screen = Screen(server, TINKER_API_KEY="tml-nobody")

    left = screen.rest().rpartition("\x1b[?1049l")[2]
    assert "401" in left
    assert screen.process.returncode == 1
