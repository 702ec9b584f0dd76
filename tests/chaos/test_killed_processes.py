"""kill -9 during a training loop: no client hangs, no saved state is lost, training resumes."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import NOT_DURABLE, Server, a_server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run one server for all tests: each test restarts what it has killed."""
    folder = tmp_path_factory.mktemp("state")
    with a_server(folder, {MODEL: model_folder}, NOT_DURABLE) as running:
        yield running


def a_training_client(server: Server) -> tinker.TrainingClient:
    client = server.client()
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def kill_soon(kill: Callable[[], None]) -> threading.Thread:
    """Kill something shortly, while the caller continues."""

    def later() -> None:
        time.sleep(0.3)
        kill()

    thread = threading.Thread(target=later)
    thread.start()
    return thread


def train_until_failure(training: tinker.TrainingClient) -> Exception:
    """Train until the client gets an error, and return that error."""
    while True:
        try:
            step(training)
        except (tinker.TinkerError, ValueError) as error:
            return error


def test_a_killed_head_fails_its_runs_permanently_and_they_resume_from_a_checkpoint(
    server: Server,
) -> None:
    training = a_training_client(server)
    for _ in range(3):
        step(training)
    path = training.save_state("three").result().path
    expected = [step(training) for _ in range(3)]

    killer = kill_soon(server.kill_heads)
    error = train_until_failure(training)
    killer.join()

    assert path in str(error)
    assert "create_training_client_from_state_with_optimizer" in str(error)
    listed = server.rest().list_checkpoints(training.model_id).result().checkpoints
    assert [entry.tinker_path for entry in listed] == [path]
    resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
    assert [step(resumed) for _ in range(3)] == expected


@pytest.mark.long
def test_samples_of_a_saved_checkpoint_survive_a_killed_head(server: Server) -> None:
    training = a_training_client(server)
    step(training)
    path = training.save_weights_for_sampler("one").result().path
    sampler = server.client().create_sampling_client(model_path=path).result()
    ephemeral = training.save_weights_and_get_sampling_client().result()
    text = types.ModelInput.from_ints([5, 6, 7])
    before = sampler.compute_logprobs(text).result()

    params = types.SamplingParams(max_tokens=200, stop=[], seed=1)
    futures = [sampler.sample(text, 4, params) for _ in range(8)]
    killer = kill_soon(server.kill_heads)
    killer.join()

    assert all(len(f.result().sequences) == 4 for f in futures)
    assert sampler.compute_logprobs(text).result() == before
    with pytest.raises(tinker.BadRequestError, match="not saved under a name"):
        ephemeral.compute_logprobs(text).result()


def test_a_restarted_server_finds_its_runs_and_training_continues(server: Server) -> None:
    uninterrupted = a_training_client(server)
    expected = [step(uninterrupted) for _ in range(60)]
    training = a_training_client(server)
    pids = server.head_pids()

    def restart() -> None:
        server.kill()
        time.sleep(0.5)
        server.start()

    killer = kill_soon(restart)
    losses = [step(training) for _ in range(60)]
    killer.join()

    assert losses == expected
    assert server.head_pids() == pids
    assert training.save_state("after").result().path


@pytest.mark.long
def test_a_head_killed_while_suspending_idle_models_leaves_each_intact_or_lost(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = {"TINKERCLOUD_SESSION_SILENCE_SECONDS": "1"}
    with a_server(tmp_path / "state", {MODEL: model_folder}, settings) as server:
        uninterrupted = a_training_client(server)
        expected = [step(uninterrupted) for _ in range(3)]
        silent = [a_training_client(server) for _ in range(6)]
        assert [step(training) for training in silent] == expected[:1] * 6
        runs = server.state_dir / "checkpoints" / "runs"

        def some_are_suspended() -> bool:
            return any((runs / t.model_id / "suspended/manifest.json").exists() for t in silent)

        wait_until(some_are_suspended, "the first suspension")
        server.kill_heads()

        for training in silent:
            outcome = losses_or_failure(training, 2)
            assert outcome == expected[1:] or "session head stopped" in str(outcome)


def losses_or_failure(training: tinker.TrainingClient, steps: int) -> list[float] | Exception:
    try:
        return [step(training) for _ in range(steps)]
    except (tinker.TinkerError, ValueError) as error:
        return error


def has_ended(pid: int) -> bool:
    # A zombie process has no command line.
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or not command.read_bytes()


@pytest.mark.long
def test_a_head_exits_if_its_server_never_returns(model_folder: Path, tmp_path: Path) -> None:
    settings = {"TINKERCLOUD_ORPHAN_GRACE_SECONDS": "1"}
    with a_server(tmp_path / "state", {MODEL: model_folder}, settings) as server:
        a_training_client(server)
        (pid,) = server.head_pids()

        server.kill()

        wait_until(lambda: has_ended(pid), "the head's end")


def test_a_checkpoint_interrupted_by_a_kill_is_not_listed(server: Server) -> None:
    training = a_training_client(server)
    saved: list[str] = []

    def save_repeatedly() -> None:
        while True:
            path = training.save_state(f"save-{len(saved)}").result().path
            saved.append(path)

    killer = kill_soon(server.kill_heads)
    with pytest.raises((tinker.TinkerError, ValueError)):
        save_repeatedly()
    killer.join()

    listed = {
        entry.tinker_path
        for entry in server.rest().list_checkpoints(training.model_id).result().checkpoints
    }

    assert saved
    assert set(saved) <= listed
    client = server.client()
    for path in sorted(listed)[-2:]:
        client.create_training_client_from_state_with_optimizer(path).result()


def test_a_restart_keeps_keys_runs_checkpoints_and_trained_weights(server: Server) -> None:
    training = a_training_client(server)
    step(training)
    path = training.save_state("one").result().path
    expected = [step(training), step(training)]
    key = server.new_key("somebody")

    server.stop()
    server.start()

    assert server.request("GET", "/api/v1/sessions", key=key).status == 200
    run = server.rest().get_training_run(training.model_id).result()
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
    assert [step(resumed), step(resumed)] == expected
    assert step(resumed) == step(training)


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_fails_with_the_reason(
    model_folder: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with (
        a_server(tmp_path / "state", {"broken": broken}) as server,
        pytest.raises(tinker.RequestFailedError, match="failed to start"),
    ):
        server.client().create_lora_training_client("broken", rank=4).result()
