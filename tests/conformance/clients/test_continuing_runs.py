"""A run whose client has gone continues in a new process, with the lines that a command prints."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tinkercloud_api.commands import run_commands
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, NOT_DURABLE, Server, a_server

MODEL = "tiny/llama"
STEPS = 3
"""Steps of a client until it goes away, and of the one that continues."""
SUPPORT = Path(__file__).parents[2] / "support"
TRAINING = f"""
training_client = service_client.create_lora_training_client("{MODEL}", rank=4, seed=1).result()
print(training_client.model_id, flush=True)
while True:
    print(step(training_client, first=int(sys.stdin.readline())), flush=True)
"""
START = """
import sys
import tinker
from tinkercloud_testing.clients.sdk_steps import step
"""
PLAIN = f"{START}service_client = tinker.ServiceClient(display_name='nightly'){TRAINING}"
CLOSING = f"{START}with tinker.ServiceClient(display_name='nightly') as service_client:" + (
    TRAINING.replace("\n", "\n    ")
)
FURTHER_STEPS = f"""
from tinkercloud_testing.clients.sdk_steps import step
print("losses", *[step(training_client) for _ in range({STEPS})])
"""


def environment(server: Server, key: str = API_KEY) -> dict[str, str]:
    user = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key, "PYTHONPATH": str(SUPPORT)}
    return {**server.environment(), **user}


class Client:
    """A process with the SDK that trains one model."""

    def __init__(self, server: Server, code: str = PLAIN, key: str = API_KEY) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(server, key),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.run = self._printed()

    def _printed(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self, first: int = 5) -> float | None:
        """Train one step on a text; return its loss, or None if the client fails."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first}\n")
        self.process.stdin.flush()
        printed = self._printed()
        return float(printed) if printed else None

    def leave(self, number: signal.Signals) -> None:
        """Send it a signal; wait until it has ended, unless that only stops it."""
        self.process.send_signal(number)
        if number is not signal.SIGSTOP:
            self.process.wait()


@contextmanager
def a_client(server: Server, code: str = PLAIN, key: str = API_KEY) -> Iterator[Client]:
    client = Client(server, code, key)
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()


def runs(server: Server, *arguments: str, key: str = API_KEY, answer: str = "") -> Result:
    """Run `tinkercloud runs` as a user, who answers a question with a text."""
    variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key}
    return CliRunner().invoke(run_commands.app, arguments, input=answer, env=variables)


def printed(server: Server, *arguments: str, key: str = API_KEY) -> str:
    result = runs(server, *arguments, key=key)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def said(result: Result) -> str:
    """Return what a command has said in addition to its output, without the breaks of lines."""
    return " ".join(result.stderr.split())


def shown(server: Server, run: str, key: str = API_KEY) -> dict[str, Any]:
    found = json.loads(printed(server, "show", run, "--json", key=key))
    assert isinstance(found, dict)
    return found


def listed(server: Server, status: str) -> list[dict[str, Any]]:
    """Return the runs that have a status."""
    found: list[dict[str, Any]] = json.loads(printed(server, "list", "--status", status, "--json"))
    return found


def losses_of(server: Server, lines: str) -> list[float]:
    """Run printed lines in a new process; return the losses of the next steps."""
    result = subprocess.run(
        [sys.executable, "-c", lines + FURTHER_STEPS],
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (line,) = [each for each in result.stdout.splitlines() if each.startswith("losses ")]
    return [float(each) for each in line.split()[1:]]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[float]:
    """Return the losses of a run that nothing interrupts."""
    client = server.client()
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    return [step(training) for _ in range(2 * STEPS)]


LEAVINGS: Mapping[str, tuple[str, signal.Signals, str]] = {
    "Ctrl-C": (PLAIN, signal.SIGINT, "live"),
    "Ctrl-C in a with block": (CLOSING, signal.SIGINT, "ended"),
    "a restarted kernel": (PLAIN, signal.SIGKILL, "live"),
}
"""What the client does, how it goes away, and the state of its run afterwards."""


@pytest.mark.parametrize(
    "leaving",
    [
        "Ctrl-C",
        *(pytest.param(each, marks=pytest.mark.long) for each in LEAVINGS if each != "Ctrl-C"),
    ],
)
def test_a_run_whose_client_went_away_continues_to_the_bit(
    server: Server, expected: list[float], leaving: str
) -> None:
    code, number, state = LEAVINGS[leaving]
    with a_client(server, code) as client:
        assert [client.step() for _ in range(STEPS)] == expected[:STEPS]
        client.leave(number)

        assert shown(server, client.run)["state"] == state
        lines = printed(server, "attach", client.run, "--yes")

    assert f"taken {STEPS} steps: continue with the data of step {STEPS + 1}" in lines
    assert losses_of(server, lines + f"assert step == {STEPS}\n") == expected[STEPS:]


def test_the_same_lines_continue_a_run_from_where_it_is_in_each_process_that_runs_them(
    server: Server, expected: list[float]
) -> None:
    with a_client(server) as client:
        client.leave(signal.SIGKILL)
        lines = printed(server, "attach", client.run, "--yes")

    assert losses_of(server, lines) == expected[:STEPS]
    assert losses_of(server, lines + f"assert step == {STEPS}\n") == expected[STEPS:]


@pytest.mark.long
def test_the_lines_for_a_run_in_a_project_create_everything_in_it(
    server: Server, expected: list[float]
) -> None:
    bob = server.new_key("bob-who-views")
    for method, path, body in (
        ("POST", "projects", {"name": "Continued", "project_id": "continued"}),
        ("PUT", "projects/continued/members/bob-who-views", {"role": "viewer"}),
    ):
        assert server.request(method, f"/api/v1/{path}", body).status == 200
    in_project = "ServiceClient(project_id='continued'"
    with a_client(server, PLAIN.replace("ServiceClient(", f"{in_project}, ")) as client:
        client.step()
        client.leave(signal.SIGKILL)
        live = printed(server, "attach", client.run, "--yes")
        printed(server, "stop", client.run, "--yes")

        ended = printed(server, "attach", client.run)
        viewed = printed(server, "attach", client.run, key=bob)

    assert all(f"tinker.{in_project})" in lines for lines in (live, ended))
    assert "tinker.ServiceClient()" in viewed
    assert losses_of(server, ended) == expected[1 : STEPS + 1]
    assert shown(server, listed(server, "open")[0]["run_id"])["project_id"] == "continued"


def test_a_run_of_a_closed_laptop_is_suspended_and_continues_to_the_bit_without_its_old_client(
    model_folder: Path, tmp_path: Path, expected: list[float]
) -> None:
    silent = {"TINKERCLOUD_SESSION_SILENCE_SECONDS": "1"}
    with (
        a_server(tmp_path, {MODEL: model_folder}, silent) as server,
        a_client(server) as client,
    ):
        assert [client.step() for _ in range(STEPS)] == expected[:STEPS]
        client.leave(signal.SIGSTOP)
        wait_until(lambda: shown(server, client.run)["state"] == "suspended", "its suspension")
        assert shown(server, client.run)["step"] == STEPS

        lines = printed(server, "attach", client.run, "--yes")
        assert losses_of(server, lines) == expected[STEPS:]

        client.process.send_signal(signal.SIGCONT)
        assert client.step(first=6) is None


@pytest.mark.long
def test_a_run_on_disk_after_a_crash_of_the_server_continues_to_the_bit(
    model_folder: Path, tmp_path: Path, expected: list[float]
) -> None:
    with a_server(tmp_path, {MODEL: model_folder}) as server:
        with a_client(server) as client:
            assert [client.step() for _ in range(STEPS)] == expected[:STEPS]
            client.leave(signal.SIGKILL)
        curve = f"/api/v1/runs/{client.run}/curve"
        wait_until(
            lambda: (
                [each["step"] for each in server.request("GET", curve).json()["points"]][-1:]
                == [STEPS]
            ),
            "the report of the last step",
        )
        server.kill()
        server.kill_heads()
        server.start()

        assert shown(server, client.run)["state"] == "on disk"
        session = f"/api/v1/session_usage/{client.run.partition(':')[0]}"
        (model,) = server.request("GET", session).json()["models"]
        assert (model["state"], model["step"]) == ("suspended", STEPS)
        lines = printed(server, "attach", client.run, "--yes")
        assert losses_of(server, lines) == expected[STEPS:]


@pytest.mark.long
def test_attaching_waits_for_a_model_that_loads_and_waiting_requests_say_so(
    model_folder: Path, tmp_path: Path, expected: list[float]
) -> None:
    attach = [sys.executable, "-m", "tinkercloud_api", "runs", "attach"]
    with (
        a_server(tmp_path, {MODEL: model_folder}) as server,
        a_client(server) as client,
        a_client(server) as gone,
    ):
        assert [client.step() for _ in range(STEPS)] == expected[:STEPS]
        gone.step()
        gone.leave(signal.SIGKILL)
        server.kill()
        server.kill_heads()
        before = len(server.log)
        server.start()
        wait_until(lambda: "session head started" in server.log[before:], "the head")
        loading = int(server.log[before:].split("pid=")[1].split()[0])
        os.kill(loading, signal.SIGSTOP)
        try:
            threading.Thread(target=client.step, daemon=True).start()
            wait_until(lambda: shown(server, client.run)["queue_state"] == "waiting", "the request")
            waits, idle = shown(server, client.run), shown(server, gone.run)
            waiting, on_disk = listed(server, "waiting"), listed(server, "on disk")
            with subprocess.Popen(
                [*attach, gone.run, "--yes"],
                env=environment(server),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as attaching:
                assert attaching.stdout is not None
                assert attaching.stderr is not None
                progress = next(each for each in attaching.stderr if each.startswith(f"{MODEL}: "))
                os.kill(loading, signal.SIGCONT)
                lines = attaching.stdout.read()
        finally:
            os.kill(loading, signal.SIGCONT)

    assert re.search(r"is loading the model for \d+ s.*; then it continues$", waits["reason"])
    assert waits["queue_reason"] in waits["reason"]
    assert [each["run_id"] for each in waiting] == [client.run]
    assert "is loading the model for " in waiting[0]["queue_reason"]
    assert {each["run_id"] for each in on_disk} == {client.run, gone.run}
    assert (idle["state"], idle["queue_state"]) == ("on disk", "idle")
    assert progress.startswith(f"{MODEL}: loading for ")
    assert "The model has taken 1 steps" in lines
    assert attaching.returncode == 0


def test_automatic_checkpoints_are_listed_while_a_run_lives_and_continue_it_when_it_is_lost(
    model_folder: Path, tmp_path: Path, expected: list[float]
) -> None:
    settings = {
        **NOT_DURABLE,
        "TINKERCLOUD_AUTOSAVE__STEPS": "2",
        "TINKERCLOUD_AUTOSAVE__SECONDS": "0",
    }
    with (
        a_server(tmp_path, {MODEL: model_folder}, settings) as server,
        a_client(server) as client,
    ):
        for _ in range(2):
            client.step()
        wait_until(lambda: bool(shown(server, client.run)["checkpoints"]), "an autosave")
        client.step()
        alive = shown(server, client.run)
        (automatic,) = alive["checkpoints"]
        assert (alive["state"], alive["step"], automatic["step"]) == ("live", 3, 2)
        assert automatic["is_automatic"]
        assert continued(server, automatic["tinker_path"]) == expected[2]

        server.kill_heads()
        wait_until(lambda: shown(server, client.run)["state"] == "lost", "its loss")
        lines = printed(server, "attach", client.run)

    assert "is lost: its session head stopped without saving it" in lines
    assert "taken 2 steps: continue with the data of step 3" in lines
    assert automatic["tinker_path"] in lines


def continued(server: Server, path: str) -> float:
    client = server.client()
    return step(client.create_training_client_from_state_with_optimizer(path).result())


def test_a_run_is_listed_with_its_owner_step_rate_and_last_sign_of_life(server: Server) -> None:
    key = server.new_key("runner")
    with a_client(server, key=key) as client:
        client.step()
        (row,) = json.loads(printed(server, "list", "--json", key=key))
        table = printed(server, "list", key=key)
        mine = json.loads(printed(server, "list", "--owner", "runner", "--json"))
        others = runs(server, "list", "--owner", "bootstrap", key=key)

    assert (row["run_id"], row["owner"], row["name"]) == (client.run, "runner", "nightly")
    assert (row["base_model"], row["lora_rank"], row["state"]) == (MODEL, 4, "live")
    assert (row["step"], row["queue_state"], row["is_connected"]) == (1, "idle", True)
    assert row["tokens_per_minute"] > 0
    for text in (client.run, "runner", "nightly", MODEL, "live", "idle", " s ago"):
        assert text in table
    assert [each["run_id"] for each in mine] == [client.run]
    assert others.exit_code == 1
    assert "runs of 'bootstrap' do not exist" in said(others)


def test_saving_a_run_disturbs_no_client_and_its_checkpoint_continues_it(
    server: Server, expected: list[float]
) -> None:
    with a_client(server) as client:
        assert client.step() == expected[0]
        named = printed(server, "save", client.run, "--name", "before-the-change").strip()
        numbered = printed(server, "save", client.run).strip()
        again = runs(server, "save", client.run, "--name", "before-the-change")
        reserved = runs(server, "save", client.run, "--name", "autosave-step-000001")
        assert client.step() == expected[1]
        listed = {each["tinker_path"] for each in shown(server, client.run)["checkpoints"]}

    assert named == f"tinker://{client.run}/weights/before-the-change"
    assert numbered == f"tinker://{client.run}/weights/saved-step-000001"
    assert listed >= {named, numbered}
    assert continued(server, named) == continued(server, numbered) == expected[1]
    assert "before-the-change" in said(again)
    assert "reserved for automatic checkpoints" in said(reserved)
    assert (again.exit_code, reserved.exit_code) == (1, 1)


def test_a_run_is_stopped_after_a_question_and_continues_from_what_was_saved(
    server: Server, expected: list[float]
) -> None:
    with a_client(server) as client:
        client.step()
        refused = runs(server, "stop", client.run, answer="n\n")
        unasked = [runs(server, command, client.run) for command in ("stop", "attach")]
        assert shown(server, client.run)["state"] == "live"
        stopped = printed(server, "stop", client.run, "--yes").strip()
        assert client.step() is None

    assert [each.exit_code for each in (refused, *unasked)] == [1, 1, 1]
    assert all("there is no terminal to ask in; use --yes" in said(each) for each in unasked)
    assert re.search(rf"End run {client.run} \(nightly\) of \S+, step 1, last seen", said(refused))
    assert stopped == f"tinker://{client.run}/weights/last-step-000001"
    after = shown(server, client.run)
    assert (after["state"], after["step"]) == ("ended", 1)
    lines = printed(server, "attach", client.run)
    assert losses_of(server, lines) == expected[1 : 1 + STEPS]
    assert printed(server, "stop", client.run, "--yes").strip() == "ended"


def test_a_suspended_run_leaves_memory_until_its_next_request(
    server: Server, expected: list[float]
) -> None:
    with a_client(server) as client:
        assert client.step() == expected[0]
        assert printed(server, "stop", client.run, "--suspend", "--yes").strip() == "suspended"
        assert printed(server, "stop", client.run, "--suspend", "--yes").strip() == "suspended"
        after = shown(server, client.run)
        suspended, idle = listed(server, "suspended"), listed(server, "idle")
        assert client.step() == expected[1]

    assert (after["state"], after["step"], after["memory_bytes"]) == ("suspended", 1, 0)
    assert after["reason"] == "its next request continues it where it was"
    assert client.run in {each["run_id"] for each in suspended}
    assert client.run not in {each["run_id"] for each in idle}


def test_a_status_that_there_is_not_is_refused_with_the_others(server: Server) -> None:
    refused = runs(server, "list", "--status", "sleeping")

    assert refused.exit_code == 1
    assert re.search(r"400: status: .*'suspended'.*'waiting'", said(refused))


CALLS: Mapping[str, Callable[[str], list[str]]] = {
    "show": lambda run: ["show", run],
    "save": lambda run: ["save", run],
    "stop": lambda run: ["stop", run, "--yes"],
    "attach": lambda run: ["attach", run, "--yes"],
}


def test_a_run_of_another_owner_does_not_exist_and_saves_and_stops_are_audited(
    server: Server,
) -> None:
    stranger = server.new_key("stranger-of-runs")
    with a_client(server) as client:
        for call in CALLS.values():
            refused = runs(server, *call(client.run), key=stranger)
            assert refused.exit_code == 1
            assert "404: training run" in said(refused)
        for action in ("save", "stop"):
            path = f"/api/v1/runs/{client.run}/{action}"
            assert server.request("POST", path, {}, key=stranger).status == 404
            assert server.request("POST", path, {}).status == 200

    audit = [sys.executable, "-m", "tinkercloud_api", "audit", "--json"]
    printed = subprocess.check_output(audit, env=environment(server))
    entries = [json.loads(line) for line in printed.splitlines()]
    of_run = [each for each in entries if client.run in each.get("objects", [])]
    named = {(each["event"], each["status"], *sorted(each["objects"])) for each in of_run}
    assert ("run_stop", 200, *sorted([client.run, "ended"])) in named
    assert ("checkpoint_write", 200) in {each[:2] for each in named}


def test_the_curve_of_a_run_continues_after_its_head_was_killed(server: Server) -> None:
    client = Client(server)
    assert "has taken no optimizer step yet" in runs(server, "curve", client.run).stdout
    losses = [client.step(), client.step()]
    server.kill_heads()
    losses.append(client.step())
    assert None not in losses
    wait_until(lambda: len(curve(server, client.run)) == 3, "three points of the curve")

    shown = [point["metrics"]["loss"] for point in curve(server, client.run)]

    assert [point["step"] for point in curve(server, client.run)] == [1, 2, 3]
    assert [values["mean"] for values in shown] == pytest.approx(
        [loss / 4 for loss in losses if loss is not None]
    )
    table = runs(server, "curve", client.run).stdout
    assert all(f"{values['mean']:.5g}" in table for values in shown)
    client.process.kill()
    runs(server, "stop", client.run, "--yes")
    assert len(curve(server, client.run)) == 3
    # Those of other tests that have not ended come first.
    listed = json.loads(printed(server, "list", "--json", "--limit", "100"))
    assert [(each["state"], each["step"]) for each in listed if each["run_id"] == client.run] == [
        ("ended", 3)
    ]


def curve(server: Server, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(runs(server, "curve", run, "--json").stdout)["points"]
    return found
