"""kill -9 of a head loses at most the steps since the last automatic checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import NOT_DURABLE, Server, a_server

MODEL = "tiny/llama"
EVERY_2_STEPS = {
    **NOT_DURABLE,
    "TINKERCLOUD_AUTOSAVE__STEPS": "2",
    "TINKERCLOUD_AUTOSAVE__SECONDS": "0",
}
AT_ONCE = {"TINKERCLOUD_AUTOSAVE__STEPS": "1"}


def a_training_client(server: Server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def autosaves(server: Server, training: tinker.TrainingClient) -> list[str]:
    """Return the names of a run's complete automatic checkpoints."""
    folder = server.state_dir / "checkpoints" / "runs" / training.model_id / "weights"
    return sorted(each.parent.name for each in folder.glob("autosave-*/manifest.json"))


def names(*steps: int) -> list[str]:
    return [f"autosave-step-{each:06d}" for each in steps]


def listed(server: Server, training: tinker.TrainingClient) -> list[str]:
    checkpoints = server.rest().list_checkpoints(training.model_id).result().checkpoints
    return sorted(each.checkpoint_id.removeprefix("weights/") for each in checkpoints)


def failure_of(call: Callable[[], object]) -> str:
    with pytest.raises((tinker.TinkerError, ValueError)) as raised:
        call()
    return str(raised.value)


def test_a_run_whose_head_is_killed_continues_from_its_last_autosave_bit_for_bit(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path, {MODEL: model_folder}, EVERY_2_STEPS) as server:
        undisturbed = a_training_client(server)
        expected = [step(undisturbed) for _ in range(10)]
        training = a_training_client(server)
        for _ in range(3):
            train_until_autosave(server, training)
        wait_until(lambda: autosaves(server, training) == names(4, 6), "the oldest is deleted")
        assert listed(server, training) == []
        assert step(training) == expected[6]

        server.kill_heads()
        message = failure_of(lambda: step(training))

        path = f"tinker://{training.model_id}/weights/autosave-step-000006"
        assert f"create_training_client_from_state_with_optimizer({path!r})" in message
        assert listed(server, training) == names(4, 6)
        stranger = server.client(server.new_key("stranger"))
        with pytest.raises(tinker.NotFoundError):
            stranger.create_training_client_from_state_with_optimizer(path).result()
        resumed = server.client().create_training_client_from_state_with_optimizer(path).result()
        assert [step(resumed) for _ in range(4)] == expected[6:]

        # The error has named one of them, so they outlive the run.
        training.holder.close()
        end_session(server, training)
        assert autosaves(server, training) == names(4, 6)
        server.rest().delete_checkpoint(training.model_id, "weights/autosave-step-000004").result()
        assert listed(server, training) == names(6)


def train_until_autosave(server: Server, training: tinker.TrainingClient) -> None:
    before = autosaves(server, training)
    for _ in range(2):
        step(training)
    wait_until(lambda: autosaves(server, training) != before, "an autosave")


def end_session(server: Server, training: tinker.TrainingClient) -> None:
    session = training.holder.get_session_id()
    assert server.request("DELETE", f"/api/v1/sessions/{session}").status == 200


@pytest.mark.long
def test_a_single_step_is_saved_after_some_time_and_deleting_a_run_deletes_its_autosaves(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = {"TINKERCLOUD_AUTOSAVE__STEPS": "0", "TINKERCLOUD_AUTOSAVE__SECONDS": "0.5"}
    with a_server(tmp_path, {MODEL: model_folder}, settings) as server:
        idle, training = a_training_client(server), a_training_client(server)
        step(training)

        wait_until(lambda: autosaves(server, training) == names(1), "an autosave")
        assert autosaves(server, idle) == []
        end_session(server, training)

        wait_until(lambda: autosaves(server, training) == [], "their deletion")


@pytest.mark.long
def test_deleting_a_suspended_run_deletes_its_autosaves(model_folder: Path, tmp_path: Path) -> None:
    with a_server(tmp_path, {MODEL: model_folder}, AT_ONCE) as server:
        training = a_training_client(server)
        step(training)
        wait_until(lambda: autosaves(server, training) == names(1), "an autosave")
        server.stop()
        assert autosaves(server, training) == names(1)
        server.start()

        end_session(server, training)

        wait_until(lambda: autosaves(server, training) == [], "their deletion")
