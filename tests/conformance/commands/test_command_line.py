"""The `tinkercloud` command with a running server, and how the server handles signals."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server

MODEL = "tiny/llama"


def tinkercloud(
    server: Server, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user of the server, and return the finished process."""
    user = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    return subprocess.run(
        [sys.executable, "-m", "tinkercloud_api", *arguments],
        env={**server.environment(), **user, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_key_can_be_created_used_listed_and_revoked(server: Server) -> None:
    made = json.loads(server.command("keys", "create", "ci", "--owner", "team", "--json"))
    assert server.request("GET", "/api/v1/sessions", key=made["key"]).status == 200

    server.command("keys", "revoke", "--yes", str(made["id"]))

    listed = {row["id"]: row for row in json.loads(server.command("keys", "list", "--json"))}
    assert listed[made["id"]]["owner"] == "team"
    assert listed[made["id"]]["revoked"]
    assert made["key"] not in server.command("keys", "list", "--json")


def test_a_key_shows_when_it_expires_and_when_it_was_last_used(server: Server) -> None:
    made = json.loads(server.command("keys", "create", "guest", "--expires", "30d", "--json"))
    expires = datetime.fromisoformat(made["expires"])

    def listed() -> dict[str, str]:
        rows = json.loads(server.command("keys", "list", "--json"))
        return next(row for row in rows if row["id"] == made["id"])

    assert timedelta(days=29) < expires - datetime.now(UTC) <= timedelta(days=30)
    assert listed()["expires"] == made["expires"]
    assert listed()["last used"] == ""
    shown = server.request("GET", "/api/v1/auth/apikey/me", key=made["key"]).json()
    assert datetime.fromisoformat(shown["expires_at"]).replace(microsecond=0) == expires
    wait_until(lambda: listed()["last used"] != "", "the use to be recorded")


def test_an_invalid_lifetime_is_rejected_with_examples(server: Server) -> None:
    result = tinkercloud(server, "keys", "create", "guest", "--expires", "soon")

    assert result.returncode == 2
    assert "30d" in result.stderr


def test_a_key_command_names_its_state_folder_and_the_server_using_it(
    server: Server, tmp_path: Path
) -> None:
    assert server.process is not None

    served = tinkercloud(server, "keys", "list")
    made = tinkercloud(server, "keys", "create", "me", "--state-dir", str(tmp_path / "new"))
    again = tinkercloud(server, "keys", "list", "--state-dir", str(tmp_path / "new"))

    pid = server.process.pid
    assert f"in {server.state_dir}, used by the server with process id {pid}" in served.stderr
    assert made.stdout.startswith("tml-")
    assert f"in {tmp_path / 'new'} (newly created); no server uses it" in made.stderr
    assert f"in {tmp_path / 'new'}; no server uses it" in again.stderr


def test_an_unusable_state_folder_is_reported_in_one_sentence(server: Server) -> None:
    refused = tinkercloud(server, "serve", "--port", "0", "--state-dir", "/etc/hostname")

    assert refused.returncode == 1
    assert "\nerror: state_dir: cannot use /etc/hostname (" in refused.stderr


def test_a_key_that_does_not_exist_cannot_be_revoked(server: Server) -> None:
    result = tinkercloud(server, "keys", "revoke", "--yes", "999999")

    assert result.returncode == 1
    assert "key 999999 does not exist or is already revoked" in result.stderr


def test_models_are_listed_for_people_and_for_scripts(server: Server) -> None:
    def listed() -> list[tuple[str, str]]:
        rows = json.loads(tinkercloud(server, "models", "list", "--json").stdout)
        return [(row["model_name"], row["state"]) for row in rows]

    wait_until(lambda: listed() == [(MODEL, "ready")], "the model")
    assert MODEL in tinkercloud(server, "models", "list").stdout


def test_the_log_of_a_head_is_found_by_its_model(server: Server) -> None:
    wait_until(lambda: tinkercloud(server, "logs", MODEL).stdout != "", "a line of the head")
    shown = tinkercloud(server, "logs", MODEL, "--lines", "3")
    unknown = tinkercloud(server, "logs", "tiny/absent")

    assert shown.returncode == 0, shown.stderr
    assert 0 < len(shown.stdout.splitlines()) <= 3
    assert "head.log" in shown.stderr
    assert unknown.returncode == 1
    assert "no head has served 'tiny/absent'" in unknown.stderr


def test_a_session_is_listed_shown_and_ended(server: Server) -> None:
    key = server.new_key("cli-sessions")
    user = {"TINKER_API_KEY": key}
    training = server.client(key).create_lora_training_client(MODEL, rank=4).result()
    session = training.holder.get_session_id()

    listed = json.loads(tinkercloud(server, "sessions", "list", "--json", **user).stdout)
    shown = json.loads(tinkercloud(server, "sessions", "show", session, "--json", **user).stdout)
    pages = [
        tinkercloud(server, "sessions", *page, **user).stdout
        for page in (["list"], ["show", session])
    ]
    unasked = tinkercloud(server, "sessions", "delete", session, **user)
    tinkercloud(server, "sessions", "delete", session, "--yes", **user)
    afterwards = tinkercloud(server, "sessions", "list", **user).stdout

    (row,) = listed
    assert (row["session"], row["owner"], row["state"]) == (session, "cli-sessions", "live")
    assert row["last_heartbeat_at"]
    assert row["memory_bytes"] > 0
    assert shown["training_run_ids"] == [training.model_id]
    assert [model["state"] for model in shown["models"]] == ["in memory"]
    for page in pages:
        for text in (session, "cli-sessions", "live", "iB"):
            assert text in page
    assert training.model_id in pages[1]
    assert unasked.returncode == 1
    assert f"End session {session} of cli-sessions with its runs (1)? [y/N]" in unasked.stderr
    assert "ended" in afterwards
    ended = tinkercloud(server, "runs", "show", training.model_id, **user).stdout
    assert "reason: its session was ended (interrupted, deleted by its owner)" in ended
    answer = server.post("session_heartbeat", {"session_id": session}, key=key)
    assert answer.status == 410


def test_a_server_deletes_only_what_its_user_agrees_to_delete(server: Server) -> None:
    user = {"TINKER_API_KEY": server.new_key("cli-deletions")}
    training = server.client(user["TINKER_API_KEY"]).create_lora_training_client(MODEL, rank=4)
    path = training.result().save_state("kept").result().path
    tinkercloud(server, "projects", "create", "Short", "--id", "cli-short", **user)

    for command, deleted in (
        (("checkpoints", "delete", path), {"deleted": [path]}),
        (("projects", "delete", "cli-short"), None),
        (("projects", "remove-member", "cli-short", "cli-deletions"), None),
        (("checkpoints", "uploads", "--delete", "none"), None),
    ):
        unasked = tinkercloud(server, *command, **user)
        assert (unasked.returncode, unasked.stdout.strip()) == (1, "")
        assert "? [y/N]" in unasked.stderr
        assert "there is no terminal to ask in; use --yes" in unasked.stderr
        if deleted is not None:
            done = tinkercloud(server, *command, "--yes", "--json", **user)
            assert json.loads(done.stdout) == deleted

    renamed = tinkercloud(server, "projects", "rename", "cli-short", "S", "--json", **user)
    assert json.loads(renamed.stdout) == {"project_id": "cli-short", "name": "S"}
    gone = tinkercloud(server, "projects", "delete", "cli-short", "--yes", "--json", **user)
    assert (gone.returncode, json.loads(gone.stdout)) == (0, {"project_id": "cli-short"})


def test_an_unreachable_server_is_named(server: Server) -> None:
    result = tinkercloud(server, "models", "list", TINKER_BASE_URL="http://127.0.0.1:9")

    assert result.returncode == 1
    assert "no server responds at http://127.0.0.1:9" in result.stderr


def test_a_rejected_key_is_reported(server: Server) -> None:
    result = tinkercloud(server, "models", "list", TINKER_API_KEY="tml-nobody")

    assert result.returncode == 1
    assert "401" in result.stderr


def test_the_doctor_finds_no_problem_with_a_running_server_and_its_models(server: Server) -> None:
    result = tinkercloud(server, "doctor", "--json")
    findings = {row["check"]: row["result"] for row in json.loads(result.stdout)}

    assert result.returncode == 0, result.stdout
    assert findings[f"model {MODEL}"] == "ok"
    assert findings["server"] == "ok"


def test_the_doctor_and_other_commands_find_a_server_at_another_port(
    server: Server, tmp_path: Path
) -> None:
    environment = {**server.environment(), "TINKER_API_KEY": API_KEY}
    del environment["TINKERCLOUD_PORT"]

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "tinkercloud_api", *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout

    checks = {finding["check"]: finding for finding in json.loads(run("doctor", "--json"))}
    assert checks["server"]["result"] == "ok"
    assert server.url in checks["server"]["detail"]
    assert MODEL in run("models", "list")


def test_the_doctor_names_the_missing_model(server: Server) -> None:
    models = json.dumps({"absent": "/nowhere/at/all"})
    result = tinkercloud(server, "doctor", "--json", TINKERCLOUD_MODELS=models)
    (finding,) = [row for row in json.loads(result.stdout) if row["check"] == "model absent"]

    assert result.returncode == 1
    assert finding["result"] == "FAILED"
    assert "'/nowhere/at/all' is neither a local folder nor" in finding["detail"]


def test_a_second_server_with_the_same_state_folder_is_rejected(server: Server) -> None:
    result = tinkercloud(server, "serve", "--port", "0")

    assert result.returncode == 1
    assert "serves" in result.stderr
    assert "TINKERCLOUD_STATE_DIR" in result.stderr


def test_a_port_in_use_is_named(server: Server, tmp_path: Path) -> None:
    result = tinkercloud(server, "serve", "--state-dir", str(tmp_path))

    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in result.stderr


def test_an_unreachable_database_is_named_without_its_password(server: Server) -> None:
    away = f"postgresql+asyncpg://me:secret@127.0.0.1:{free_port()}/catalog"

    refused = tinkercloud(server, "keys", "list", TINKERCLOUD_DATABASE_URL=away)

    assert refused.returncode == 1
    assert "database_url: cannot open the catalog at" in refused.stderr
    assert "secret" not in refused.stderr


def test_an_unknown_setting_is_rejected_by_name(server: Server) -> None:
    result = tinkercloud(server, "serve", TINKERCLOUD_MAX_RANK="3")

    assert result.returncode == 1
    assert "TINKERCLOUD_MAX_RANK" in result.stderr


def test_the_first_start_prints_a_key_once(model_folder: Path, tmp_path: Path) -> None:
    server = Server({MODEL: model_folder}, tmp_path / "state")
    environment = {k: v for k, v in server.environment().items() if "BOOTSTRAP" not in k}

    def start_and_stop() -> str:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tinkercloud_api",
                "serve",
                "--model",
                f"{MODEL}={model_folder}",
            ],
            env={**environment, "TINKERCLOUD_PRELOAD": "false"},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(server.is_healthy, "the server")
        process.terminate()
        _, printed = process.communicate()
        return printed

    first, second = start_and_stop(), start_and_stop()

    key = first.split("TINKER_API_KEY=")[1].split()[0]
    assert key.startswith("tml-")
    assert "tml-" not in second.replace("tml-...", "")
    (line,) = [line for line in second.splitlines() if " keys create NAME" in line]
    made = subprocess.run(
        shlex.split(line.replace("NAME", "another")),
        env={k: v for k, v in environment.items() if k != "TINKERCLOUD_STATE_DIR"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.startswith("tml-")
    assert f"in {server.state_dir}; no server uses it" in made.stderr


@pytest.fixture(scope="module")
def log(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the terminal output of a server that was stopped after its model became ready."""
    with a_server(tmp_path_factory.mktemp("ready"), {MODEL: model_folder}) as server:
        wait_until(lambda: "the model is ready" in server.log, "the model")
    return server.log


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_reported_once_in_the_terminal_of_the_server(
    log: str, model_folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with a_server(tmp_path / "failed", {MODEL: broken}) as failed:
        wait_until(lambda: "session head failed to start" in failed.log, "its failure")
        (listed,) = json.loads(tinkercloud(failed, "models", "list", "--json").stdout)

    assert "the model is ready" in log
    assert "the model is ready" not in failed.log
    assert "failed to load the engine" in failed.log
    assert "killed" not in failed.log
    assert failed.log.count("session head started") == 1
    assert "failed to load the engine" in listed["state"]
    assert listed["state"].startswith("failed: ")


def test_a_server_says_that_it_loads_before_it_says_that_it_serves(log: str) -> None:
    said = [log.index(text) for text in ("Loading ", "loading the model", "serving it")]

    assert said == sorted(said)
    assert "Serving " not in log


@pytest.fixture
def frozen(model_folder: Path, tmp_path: Path) -> Iterator[tuple[Server, int]]:
    """Return a server whose head does not continue to load, and the head's process."""
    with a_server(tmp_path / "frozen", {MODEL: model_folder}) as server:
        wait_until(lambda: "session head started" in server.log, "the head")
        pid = int(server.log.split("pid=")[1].split()[0])
        os.kill(pid, signal.SIGSTOP)
        try:
            yield server, pid
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_client_that_waits_for_a_model_reads_how_far_it_is(frozen: tuple[Server, int]) -> None:
    server, pid = frozen
    session = server.post("create_session", {"tags": [], "sdk_version": "0.38.0"}).json()
    model = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": MODEL}
    created = server.post("create_model", {**model, "lora_config": {"rank": 2}}).json()
    path = f"/api/v1/retrieve_future/{created['request_id']}"
    waits = server.request("GET", path).json()
    (listed,) = json.loads(tinkercloud(server, "models", "list", "--json").stdout)
    wait_until(lambda: "the model is loading" in server.log, "the next report")

    assert waits["status"] == "pending"
    assert f"the session head of {MODEL!r} is loading the model for" in waits["reason"]
    assert listed["state"].startswith("loading for ")
    for text in (waits["reason"], listed["state"], server.log):
        assert re.search(r"; \d+\.\d .iB in memory; its weights have \d+\.\d .iB", text), text

    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "serving it" in server.log, "the model")


def test_a_head_that_hangs_is_named_and_a_server_that_stops_says_what_its_heads_save(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "stopping", {MODEL: model_folder}) as server:
        server.client().create_lora_training_client(MODEL, rank=4).result()
        (pid,) = server.head_pids()
        os.kill(pid, signal.SIGSTOP)
        checks = json.loads(tinkercloud(server, "doctor", "--json").stdout)
        assert server.process is not None
        server.process.terminate()
        wait_until(lambda: "the session head is stopping" in server.log, "the next report")
        os.kill(pid, signal.SIGCONT)
        server.process.wait(PATIENCE_SECONDS)

    (found,) = [each for each in checks if each["check"] == "durability"]
    assert found["result"] != "ok"
    assert f"(process {pid})" in found["detail"]
    assert "stopping a session head, which saves its runs" in server.log
    (output,) = server.state_dir.glob("heads/*/head.log")
    for step in ("reading and checking the weights", "starting the sampler", "1 of 1 runs saved"):
        assert f'"progress": "{step}"' in output.read_text()


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


MISTAKES: Mapping[str, tuple[dict[str, str], list[str], Callable[[Path], object], str]] = {
    "no GPU": (
        {"TINKERCLOUD_TRAINER__DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
        [],
        lambda _: None,
        "trainer.device: is 'cuda', but this machine has no GPU",
    ),
    "unknown family": (
        {},
        [],
        lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-family"}'),
        "has model_type 'no-such-family', of which transformers",
    ),
    "truncated weights": ({}, [], cut, "is truncated or damaged; download it again"),
    "unknown store": (
        {"TINKERCLOUD_CHECKPOINT_ROOT": "s4://bucket/x"},
        [],
        lambda _: None,
        "checkpoint_root: got 's4://bucket/x'; expected a folder, or a URL",
    ),
    "address of another machine": (
        {},
        ["--host", "192.0.2.9"],
        lambda _: None,
        "choose an address of this machine with --host",
    ),
    "alias without a name": (
        {},
        ["--alias", "x:m"],
        lambda _: None,
        "--alias 'x:m': expected ALIAS=NAME",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_settings_is_found_before_the_server_says_that_it_serves(
    model_folder: Path, tmp_path: Path, mistake: str
) -> None:
    settings, arguments, change, message = MISTAKES[mistake]
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    change(folder)
    server = Server({}, tmp_path / "state", settings)
    environment = {k: v for k, v in server.environment().items() if "BOOTSTRAP" not in k}

    result = subprocess.run(
        [
            *(sys.executable, "-m", "tinkercloud_api", "serve"),
            *(f"--model={MODEL}={folder}", "--port=0", *arguments),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode in {1, 2}
    assert message in " ".join(result.stderr.split())
    for word in ("Traceback", "Serving", "Loading", "tml-"):
        assert word not in result.stderr + result.stdout
    assert result.stderr.count("error:") == 1
    assert not (server.state_dir / "catalog.db").exists()


def test_a_graceful_stop_logs_no_error_and_no_token(
    log: str, model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "loading", {MODEL: model_folder}) as loading:
        wait_until(lambda: "session head started" in loading.log, "the head")
        # The server is waiting for the head, which answers that it is starting and is then stopped.
        (token,) = (tmp_path / "loading").glob("heads/*/token")
        secret = token.read_text()

    assert "session head stopped" in log
    for output in (log, loading.log):
        assert "[error" not in output
        assert "was never retrieved" not in output
    assert secret not in loading.log
