"""The SDK's `tinker` command, used in a terminal as a person does, with a running server."""

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
PROGRAM = Path(sys.executable).with_name("tinker")


@dataclass(frozen=True)
class Person:
    """Someone with a home folder, in which the command keeps credentials."""

    server: Server
    home: Path
    key: str
    knows_key: bool = False
    """Whether the key is in the environment; else the person logs in."""

    def environment(self) -> dict[str, str]:
        """Return the environment of the command."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TINKER")}
        own = {"HOME": str(self.home), "TINKER_BASE_URL": self.server.url, "TINKER_TELEMETRY": "0"}
        return {**inherited, **own, **({"TINKER_API_KEY": self.key} if self.knows_key else {})}

    def finished(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run the command in the home folder, and return the finished process."""
        return subprocess.run(
            [PROGRAM, *arguments],
            env=self.environment(),
            cwd=self.home,
            input=answer,
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, *arguments: str, answer: str = "") -> str:
        """Run the command, which must succeed, and return its output."""
        result = self.finished(*arguments, answer=answer)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    def json(self, *arguments: str) -> Any:
        """Run the command and return its output in JSON."""
        return json.loads(self.run("--format=json", *arguments))

    def log_in(self) -> str:
        """Log in by typing the key in a terminal, and return what the terminal showed."""
        controller, terminal = pty.openpty()
        process = subprocess.Popen(
            [PROGRAM, "auth", "login"],
            env=self.environment(),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        shown = _read_until(controller, "Paste your API key")
        os.write(controller, self.key.encode() + b"\r")
        shown += _read_until(controller, None)
        os.close(controller)
        assert process.wait() == 0, shown
        return shown


def _read_until(controller: int, text: str | None) -> str:
    """Return what a terminal shows until a text appears, or until its program has ended."""
    shown = ""
    while text is None or text not in shown:
        assert select.select([controller], [], [], PATIENCE_SECONDS)[0], shown
        try:
            part = os.read(controller, 1 << 12)
        except OSError:  # on Linux, the end of a terminal
            part = b""
        if not part:
            assert text is None, shown
            break
        shown += part.decode()
    return shown


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server with access tokens, without which the SDK's `whoami` refuses to ask."""
    settings = {"TINKERCLOUD_ACCESS_TOKENS": "true"}
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture(scope="module")
def person(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Person:
    """Return someone with a key who has not logged in."""
    return Person(server, tmp_path_factory.mktemp("home"), server.new_key("a-person"))


@pytest.fixture
def known(person: Person) -> Person:
    """Return the person with the key in the environment."""
    return replace(person, knows_key=True)


@pytest.fixture(scope="module")
def run_id(person: Person) -> str:
    """Return a run of the person with a checkpoint of each kind."""
    training = person.server.client(person.key).create_lora_training_client(MODEL, rank=4).result()
    step(training)
    training.save_state("first").result()
    training.save_weights_for_sampler("first").result()
    return str(training.model_id)


def test_a_wrong_key_is_not_stored(server: Server, tmp_path: Path) -> None:
    refused = Person(server, tmp_path, "tml-wrong").finished("auth", "login", answer="tml-wrong\n")

    assert refused.returncode == 1
    assert "Could not validate the API key" in refused.stderr
    assert not (tmp_path / ".tinker" / "credentials.json").exists()


@pytest.mark.long
def test_a_person_logs_in_looks_around_and_logs_out(person: Person, run_id: str) -> None:
    shown = person.log_in()

    assert "Logged in as" in shown
    assert person.key not in shown
    assert "Credentials available: yes" in person.run("auth", "status")
    assert "a-person" in person.run("auth", "whoami")
    assert MODEL in person.run("model", "list")
    assert [row["training_run_id"] for row in person.json("run", "list")["runs"]] == [run_id]
    assert MODEL in person.run("run", "info", run_id)
    listed = person.json("checkpoint", "list", "--run-id", run_id)["checkpoints"]
    assert {row["checkpoint_id"] for row in listed} == {"weights/first", "sampler_weights/first"}
    assert "still active" in person.run("auth", "logout")
    assert person.finished("auth", "status").returncode == 1


@pytest.mark.long
def test_a_checkpoint_is_published_given_a_lifetime_downloaded_and_deleted(
    known: Person, run_id: str
) -> None:
    path = f"tinker://{run_id}/weights/first"

    def changed(*arguments: str) -> Any:
        known.run("checkpoint", *arguments)
        return stored(known, run_id)["weights/first"]

    assert changed("publish", path).public
    assert not changed("unpublish", path).public
    expires = changed("set-ttl", path, "--ttl", "7200").expires_at - datetime.now(UTC)
    assert timedelta(hours=1) < expires <= timedelta(hours=2)
    assert changed("set-ttl", path, "--remove").expires_at is None
    assert path in known.run("--format=json", "checkpoint", "info", path)
    known.run("checkpoint", "download", path, "--output", "downloads")
    (folder,) = (known.home / "downloads").iterdir()
    files = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "cancelled" in known.run("checkpoint", "delete", path, answer="n\n")
    assert "weights/first" in stored(known, run_id)
    known.run("checkpoint", "delete", path, answer="y\n")
    assert stored(known, run_id).keys() == {"sampler_weights/first"}
    known.run("checkpoint", "delete", "--run-id", run_id, "--type", "sampler_weights", "--yes")
    assert stored(known, run_id) == {}


@pytest.mark.long
def test_another_persons_checkpoint_can_be_neither_seen_nor_changed(
    server: Server, run_id: str, tmp_path: Path
) -> None:
    stranger = Person(server, tmp_path, server.new_key("a-stranger"), knows_key=True)

    for command in ("info", "publish"):
        refused = stranger.finished("checkpoint", command, f"tinker://{run_id}/weights/first")
        assert refused.returncode == 1
        assert "belongs to another owner" in refused.stderr


@pytest.mark.long
def test_usage_and_storage_are_billed(known: Person, run_id: str) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{hour + timedelta(hours=n):%Y-%m-%dT%H:00:00Z}" for n in (-1, 2)]
    await_usage(known, *window)

    known.run("billing", "usage", *window, "--csv", "usage.csv", "--sessions-csv", "sessions.csv")

    header, *lines = (known.home / "usage.csv").read_text().splitlines()
    assert "base_model" in header.split(",")
    assert any(MODEL in line for line in lines)
    assert session_of(run_id) in (known.home / "sessions.csv").read_text()
    assert known.json("billing", "checkpoint-storage")


@pytest.mark.long
def test_the_trace_of_a_session_is_exported(known: Person, run_id: str) -> None:
    known.run("session", "export-trace", session_of(run_id), "--output", "trace.json")

    events = json.loads((known.home / "trace.json").read_text())["traceEvents"]
    assert {"forward_backward", "optim_step", "save_weights"} <= {each["name"] for each in events}


def stored(person: Person, run_id: str) -> dict[str, Any]:
    """Return the checkpoints of a run by their ids."""
    listed = person.server.rest(person.key).list_checkpoints(run_id).result().checkpoints
    return {each.checkpoint_id: each for each in listed}


def await_usage(person: Person, starting_on: str, ending_before: str) -> None:
    """Wait until the usage of the person is known."""
    path = f"/api/v1/billing/usage/events?starting_on={starting_on}&ending_before={ending_before}"

    def is_known() -> bool:
        found = person.server.request("GET", path, key=person.key)
        assert found.status == 200, found.body
        return MODEL in found.body.decode()

    wait_until(is_known, "the usage")


def session_of(run_id: str) -> str:
    """Return the session of a run."""
    return run_id.partition(":")[0]
