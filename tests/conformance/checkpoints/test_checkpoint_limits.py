"""Rejected saves, and the limit of the size of an owner's checkpoints."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def bounded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that allows one checkpoint for each owner."""
    settings = {"TINKERCLOUD_MAX_CHECKPOINT_BYTES_PER_OWNER": "1"}
    with a_server(tmp_path_factory.mktemp("bounded"), {MODEL: model_folder}, settings) as running:
        yield running


def test_an_owner_at_the_limit_learns_what_to_delete_and_can_still_train(bounded: Server) -> None:
    key = bounded.new_key("alice")
    training = bounded.client(key).create_lora_training_client(MODEL, rank=4).result()
    first = training.save_state("first").result().path

    with pytest.raises(tinker.RequestFailedError) as refused:
        training.save_state("second").result()
    with pytest.raises(tinker.RequestFailedError, match="max_checkpoint_bytes_per_owner"):
        training.save_weights_for_sampler("third").result()
    with pytest.raises(tinker.RequestFailedError, match="max_checkpoint_bytes_per_owner"):
        training.save_weights_external("fourth").result()

    stop = f"runs/{training.model_id}/stop"
    stopped = bounded.post(stop, {})
    suspended = bounded.post(stop, {"suspend": True})
    assert (stopped.status, suspended.status) == (400, 200)
    suspending = f"tinkercloud runs stop {training.model_id} --suspend"
    assert stopped.detail.endswith(suspending)

    message = str(refused.value)
    size = bounded.rest(key).list_checkpoints(training.model_id).result().checkpoints[0].size_bytes
    assert f"'alice' use {size} of 1 bytes (max_checkpoint_bytes_per_owner)" in message
    assert f"the largest are {first} ({size} bytes)" in message
    training.save_state("first", overwrite=True).result()
    bounded.rest(key).delete_checkpoint_from_tinker_path(first).result()
    assert training.save_state("second").result().path.endswith("/second")


def test_the_checkpoint_limit_applies_to_each_owner_separately(bounded: Server) -> None:
    for owner in ("bob", "carol"):
        client = bounded.client(bounded.new_key(owner))
        client.create_lora_training_client(MODEL, rank=4).result().save_state("a").result()


def test_a_save_rejected_by_the_head_leaves_no_row(server: Server) -> None:
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    training.save_state("good").result()

    for index in range(5):
        body = {"model_id": training.model_id, "seq_id": 1, "path": f"bad-{index}"}
        assert server.post("save_weights", body).status == 400

    def rows() -> list[tuple[str]]:
        with sqlite3.connect(server.state_dir / "catalog.db") as catalog:
            query = "SELECT name FROM checkpoints WHERE run_id = ?"
            return catalog.execute(query, [training.model_id]).fetchall()

    wait_until(lambda: rows() == [("good",)], "rows of refused saves to go")
