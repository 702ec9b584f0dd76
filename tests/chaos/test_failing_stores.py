"""Failing checkpoint stores and heads that cannot start: no loss goes unreported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import NOT_DURABLE, Server, a_server

MODEL = "tiny/llama"


@contextmanager
def failing_store(server: Server) -> Iterator[None]:
    """Make all writes to the checkpoint store fail, for root too."""
    runs = server.state_dir / "checkpoints" / "runs"
    aside = runs.with_name("aside")
    if runs.exists():
        runs.rename(aside)
    runs.parent.mkdir(exist_ok=True)
    runs.write_text("a file where a folder is to be")
    try:
        yield
    finally:
        runs.unlink()
        if aside.exists():
            aside.rename(runs)


def heads_folder(server: Server) -> Path:
    (folder,) = (server.state_dir / "heads").iterdir()
    return folder


def a_training_client(server: Server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def expected_losses(server: Server, count: int) -> list[float]:
    training = a_training_client(server)
    return [step(training) for _ in range(count)]


@pytest.mark.long
def test_a_stopping_head_retries_until_the_store_accepts_its_runs(
    tmp_path: Path, model_folder: Path
) -> None:
    with a_server(tmp_path, {MODEL: model_folder}) as server:
        expected = expected_losses(server, 4)
        training = a_training_client(server)
        assert [step(training), step(training)] == expected[:2]
        log = heads_folder(server) / "head.log"
        assert server.process is not None

        with failing_store(server):
            server.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: "suspending models failed; retrying" in log.read_text(), "a failed attempt"
            )
        server.stop()
        server.start()

        assert [step(training), step(training)] == expected[2:]


@pytest.mark.long
def test_runs_that_the_store_rejects_are_kept_on_disk_by_the_stopping_server(
    tmp_path: Path, model_folder: Path
) -> None:
    settings = {"TINKERCLOUD_TIMINGS__SUSPEND_SECONDS": "4"}
    with a_server(tmp_path, {MODEL: model_folder}, settings) as server:
        expected = expected_losses(server, 4)
        training = a_training_client(server)
        assert [step(training), step(training)] == expected[:2]

        with failing_store(server):
            server.stop()
        unsaved = heads_folder(server) / "unsaved"
        assert list(unsaved.rglob("manifest.json"))
        assert training.model_id in server.log
        server.start()

        assert [step(training), step(training)] == expected[2:]
        assert not list((unsaved / "runs" / training.model_id).rglob("manifest.json"))


@pytest.mark.long
def test_a_lost_run_is_reported_and_logged_even_if_no_other_head_can_start(
    tmp_path: Path, model_folder: Path
) -> None:
    folder = tmp_path / "model"
    folder.symlink_to(model_folder)
    # The loss is logged by housekeeping.
    settings = {**NOT_DURABLE, "TINKERCLOUD_HOUSEKEEPING_SECONDS": "1"}
    with a_server(tmp_path / "state", {MODEL: folder}, settings) as server:
        training = a_training_client(server)
        step(training)
        path = training.save_state("one").result().path
        words = heads_folder(server) / "head.log"
        before = words.read_text()
        folder.unlink()

        server.kill_heads()
        wait_until(lambda: "session head ended unexpectedly" in server.log, "the head's end")
        with pytest.raises((tinker.TinkerError, ValueError)) as raised:
            step(training)

        assert "session head stopped" in str(raised.value)
        assert path in str(raised.value)
        wait_until(lambda: "training run lost" in server.log, "the run's loss")
        assert training.model_id in server.log.partition("training run lost")[2]
        # No other head was wanted for that. One that is cannot start, and says why, at once again.
        for _ in range(2):
            with pytest.raises((tinker.TinkerError, ValueError), match="failed to start"):
                a_training_client(server)
        assert words.with_name("head.log.1").read_text() == before


@pytest.mark.long
def test_a_head_killed_during_startup_is_started_a_second_time(
    tmp_path: Path, model_folder: Path
) -> None:
    with a_server(tmp_path, {MODEL: model_folder}) as server:
        wait_until(lambda: "session head started" in server.log, "the head's start")
        lock = heads_folder(server) / "head.lock"
        os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)

        training = a_training_client(server)

        assert "restarting a session head" in server.log
        step(training)


def test_training_continues_while_the_store_fails_visibly_and_is_saved_afterwards(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = {"TINKERCLOUD_AUTOSAVE__STEPS": "1"}
    with a_server(tmp_path, {MODEL: model_folder}, settings) as server:
        expected = expected_losses(server, 4)
        training = a_training_client(server)
        assert step(training) == expected[0]
        wait_until(lambda: usage(server, training)["unsaved_steps"] == 0, "an autosave")

        with failing_store(server):
            assert [step(training), step(training)] == expected[1:3]
            wait_until(lambda: usage(server, training)["autosave_failure"] is not None, "a failure")
            assert usage(server, training)["unsaved_steps"] == 2
            words = (heads_folder(server) / "head.log").read_text()
            assert "autosave failed" in words
            assert "object store request failed" in words
            assert failing_autosaves(server) == 1

        wait_until(lambda: usage(server, training)["unsaved_steps"] == 0, "an autosave")
        weights = server.state_dir / "checkpoints/runs" / training.model_id / "weights"
        assert (weights / "autosave-step-000003/manifest.json").exists()
        assert usage(server, training)["autosave_failure"] is None
        assert failing_autosaves(server) == 0
        assert step(training) == expected[3]


def usage(server: Server, training: tinker.TrainingClient) -> dict[str, object]:
    session = training.holder.get_session_id()
    answer = server.request("GET", f"/api/v1/session_usage/{session}").json()
    (model,) = answer["models"]
    return dict(model)


def failing_autosaves(server: Server) -> object:
    return server.request("GET", "/api/v1/health").json()["failing_autosaves"]
