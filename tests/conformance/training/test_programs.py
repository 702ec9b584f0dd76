"""Programs on the server: RLVE next to a model, files of admins, and what survives which crash."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tinker import types

from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, NOT_DURABLE, Server, a_server
from tinkercloud_testing.small_models.answering import an_answering_model

MODEL = "tiny/answering"
RLVE: dict[str, Any] = {
    "enabled": True,
    "environment_list": ["Division"],
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": 4,
    "rollout_max_response_len": 24,
    "num_rollout": 2,
    "save_every_steps": 1,
    "learning_rate": 1e-3,
}
SECRETS = {"AWS_SECRET_ACCESS_KEY": "of the server", "TINKERCLOUD_LOG_FORMAT": "console"}
IS_RUNNING = {"Pending", "Running"}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server whose admins may run files."""
    folder = tmp_path_factory.mktemp("models") / "answering"
    model = an_answering_model(RlveConfig(**RLVE), folder)
    settings = {
        **SECRETS,
        **NOT_DURABLE,
        "TINKERCLOUD_PROGRAMS__ALLOW_CODE": "true",
        "TINKERCLOUD_PROGRAMS__MAX_PER_OWNER": "2",
    }
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model}, settings) as running:
        yield running


def create_model(server: Server, key: str = API_KEY, **changes: Any) -> Any:
    """Create a model that is trained on the server, and return its program."""
    made = server.post("create_session", {"sdk_version": "0.38.0"}, key=key).json()
    body = {
        "session_id": made["session_id"],
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
        "rlve_config": RLVE | changes,
    }
    answer = server.post("create_model", body, key=key)
    assert answer.status == 200, answer.body
    assert server.post("create_model", body, key=key).body == answer.body
    programs = programs_of(server, key)
    assert sum(each["model_id"] == answer.json()["model_id"] for each in programs) == 1
    return programs[0]


def programs_of(server: Server, key: str = API_KEY) -> list[Any]:
    programs: list[Any] = server.request("GET", "/api/v1/programs", key=key).json()["programs"]
    return programs


def show(server: Server, program: Any) -> Any:
    return server.request("GET", f"/api/v1/programs/{program['program_id']}").json()


def logs(server: Server, program: Any) -> str:
    path = f"/api/v1/programs/{program['program_id']}/logs"
    return str(server.request("GET", path).json()["text"])


def wait_for(server: Server, program: Any, ready: Callable[[Any], bool]) -> Any:
    """Wait until a program satisfies a condition, and return it; it must not fail before."""

    def is_ready() -> bool:
        now = show(server, program)
        assert now["phase"] != "Failed", logs(server, program)
        return ready(now)

    wait_until(is_ready, "the program")
    return show(server, program)


def processes_of(server: Server, module: str) -> list[psutil.Process]:
    """Return the processes that run a module or a file as programs of a server."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if any(module in part for part in child.cmdline())]


def saved_step(program: Any) -> int:
    state = program["progress"]["state"] or {}
    return int(state.get("step", 0))


@pytest.mark.long
def test_rlve_trains_a_model_that_its_client_samples_meanwhile(own_server: Server) -> None:
    program = create_model(own_server)

    ended = wait_for(own_server, program, lambda now: now["phase"] not in IS_RUNNING)

    progress = ended["progress"]
    assert (ended["phase"], ended["exit_code"], progress["step"]) == ("Succeeded", 0, 2)
    assert progress["environments"]["Division"]["prompts"] >= 4
    assert progress["metrics"]["datums"] > 0
    client = own_server.client()
    sampler = client.create_sampling_client(model_path=progress["sampler"]).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
    assert len(sampled.sequences[0].tokens) > 0
    checkpoints = own_server.rest().list_checkpoints(ended["model_id"]).result().checkpoints
    training = [each for each in checkpoints if each.checkpoint_type == "training"]
    assert [each.tinker_path for each in training] == [progress["checkpoint"]]


@pytest.mark.long
def test_rlve_continues_after_its_own_death_and_after_that_of_the_head(
    own_server: Server,
) -> None:
    program = create_model(own_server, num_rollout=1000)
    before = wait_for(own_server, program, lambda now: saved_step(now) >= 1)

    processes_of(own_server, "tinkercloud_programs.rlve")[0].kill()

    wait_for(own_server, program, lambda now: saved_step(now) > saved_step(before))
    text = logs(own_server, program)
    assert f"resumed model {program['model_id']} from tinker://" in text
    assert text.count("step 1:") == 1
    own_server.kill_heads()
    after = wait_for(
        own_server, program, lambda now: now["progress"]["model_id"] != program["model_id"]
    )
    wait_for(own_server, program, lambda now: saved_step(now) > saved_step(after))
    assert logs(own_server, program).count("step 1:") == 1
    assert len(own_server.rest().list_training_runs().result().training_runs) >= 2

    own_server.command("programs", "stop", "--yes", program["program_id"], "--api-key", API_KEY)

    assert show(own_server, program)["phase"] == "Stopped"
    assert processes_of(own_server, "tinkercloud_programs.rlve") == []


def run_file(server: Server, tmp_path: Path, source: str, *args: str) -> Any:
    """Run a file with the command, and return its program."""
    file = tmp_path / "a_program.py"
    file.write_text(source)
    url = ["--base-url", server.url, "--api-key", API_KEY]
    made = server.command("programs", "run", *url, "--model", MODEL, str(file), "--", *args)
    return show(server, {"program_id": made.strip()})


def test_a_program_has_a_key_of_its_own_until_it_ends_and_none_of_the_servers_secrets(
    own_server: Server, tmp_path: Path
) -> None:
    source = "import json, os, sys; print(json.dumps({**os.environ, 'args': sys.argv[1:]}))"

    program = run_file(own_server, tmp_path, source, "--steps", "3")

    to = ("--base-url", own_server.url, "--api-key", API_KEY)
    followed = own_server.command("programs", "logs", program["program_id"], "--follow", *to)
    ended = wait_for(own_server, program, lambda now: now["phase"] not in IS_RUNNING)
    assert ended["phase"] == "Succeeded"
    assert followed == logs(own_server, program)
    found = json.loads(followed)
    key = found["TINKER_API_KEY"]
    assert found["args"] == ["--steps", "3"]
    assert found["TINKER_BASE_URL"] == own_server.url
    assert found["TINKERCLOUD_BASE_MODEL"] == MODEL
    assert found["OMP_NUM_THREADS"] == "1"
    assert not SECRETS.keys() & found.keys()
    assert API_KEY not in found.values()
    assert key.startswith("tml-")
    assert own_server.request("GET", "/api/v1/programs", key=key).status == 401


def test_a_program_continues_when_its_server_was_killed(own_server: Server, tmp_path: Path) -> None:
    source = "import time; print('started'); time.sleep(10000)"
    program = run_file(own_server, tmp_path, source)
    wait_for(own_server, program, lambda _now: "started" in logs(own_server, program))
    (process,) = processes_of(own_server, "program.py")

    own_server.kill()
    process.wait(60)
    own_server.start()

    wait_for(own_server, program, lambda _now: logs(own_server, program).count("started") == 2)
    assert show(own_server, program)["phase"] == "Running"
    own_server.post(f"programs/{program['program_id']}/stop", {})
    assert show(own_server, program)["phase"] == "Stopped"


def test_a_program_that_fails_is_restarted_and_shows_why(
    own_server: Server, tmp_path: Path
) -> None:
    source = (
        "import os, sys, pathlib; again = pathlib.Path('again'); known = again.exists();"
        "again.touch(); print('not this time'); sys.exit(78 if known else 3)"
    )

    program = run_file(own_server, tmp_path, source)

    wait_until(lambda: show(own_server, program)["phase"] not in IS_RUNNING, "its end")
    failed = show(own_server, program)
    assert (failed["phase"], failed["restarts"], failed["exit_code"]) == ("Failed", 1, 78)
    assert failed["message"] == "exited with status 78: not this time"


def test_programs_of_one_owner_are_hidden_from_others_and_limited(own_server: Server) -> None:
    key = own_server.new_key("somebody")
    program = create_model(own_server, key, num_rollout=1000)
    stop = f"/api/v1/programs/{program['program_id']}/stop"
    another = own_server.new_key("another")
    path = f"/api/v1/programs/{program['program_id']}"
    calls = [
        ("GET", path, None),
        ("GET", f"{path}/logs", None),
        ("POST", stop, {}),
        ("POST", f"{path}/progress", {"step": 1}),
    ]

    hidden = [own_server.request(*call[:2], call[2], key=another).status for call in calls]
    taken = {"model_id": program["model_id"], "rlve_config": RLVE}
    occupied = own_server.post("programs", taken, key=key)
    create_model(own_server, key)
    refused = own_server.post("create_model", a_model(own_server, key, {}), key=key)

    assert hidden == [404] * 4
    assert programs_of(own_server, another) == []
    assert own_server.request("POST", f"{path}/progress", {"step": 1}, key=key).status == 400
    assert occupied.status == refused.status == 400
    assert f"program {program['program_id']} already trains" in occupied.detail
    assert "already runs 2 programs" in refused.detail
    for each in programs_of(own_server, key):
        session = each["model_id"].partition(":")[0]
        own_server.request("DELETE", f"/api/v1/sessions/{session}", key=key)
    ended = {(each["phase"], each["message"]) for each in programs_of(own_server, key)}
    assert ended == {("Stopped", "its model was deleted")}


def a_model(server: Server, key: str, changes: dict[str, Any]) -> dict[str, Any]:
    made = server.post("create_session", {"sdk_version": "0.38.0"}, key=key).json()
    return {
        "session_id": made["session_id"],
        "model_seq_id": 0,
        "base_model": MODEL,
        "rlve_config": RLVE | changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment_list": ["Divison"]}, "'Divison' is unknown; did you mean 'Division'"),
        ({"environment_list": []}, "environment_list: is empty"),
        ({"balance_data": False}, "balance_data: cannot be switched off"),
        ({"n_samples_per_prompt": 1}, "n_samples_per_prompt"),
        ({"rollout_max_response_len": 4096}, "must fit into 512 tokens"),
        ({"wandb": True}, "wandb"),
    ],
)
def test_an_rlve_configuration_that_cannot_be_honoured_is_rejected_before_the_model_exists(
    own_server: Server, changes: dict[str, Any], message: str
) -> None:
    key = own_server.new_key("careless")

    refused = own_server.post("create_model", a_model(own_server, key, changes), key=key)

    assert refused.status == 400
    assert message in refused.detail
    assert own_server.rest(key).list_training_runs().result().training_runs == []
    assert programs_of(own_server, key) == []


def test_only_admins_run_files_and_a_disabled_configuration_starts_nothing(
    own_server: Server,
) -> None:
    key = own_server.new_key("user")

    refused = own_server.post("programs", {"source": "print(1)"}, key=key)
    disabled = a_model(own_server, key, {"enabled": False, "environment_list": ["unknown"]})

    assert (refused.status, refused.detail) == (
        400,
        "only admin keys may run a file on this server",
    )
    assert own_server.post("create_model", disabled, key=key).status == 200
    assert programs_of(own_server, key) == []
