"""A lost catalog is rebuilt from the checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import NOT_DURABLE, Server, a_server

MODEL = "tiny/llama"


@pytest.fixture
def own_server(tmp_path: Path, model_folder: Path) -> Iterator[Server]:
    """Run a server whose catalog a test may delete."""
    with a_server(tmp_path / "state", {MODEL: model_folder}, NOT_DURABLE) as running:
        yield running


def listed(server: Server) -> dict[str, set[tuple[object, ...]]]:
    """Return all listed runs and checkpoints, without times and without public ones."""
    rest = server.rest()
    runs = rest.list_training_runs().result().training_runs
    checkpoints = rest.list_user_checkpoints().result().checkpoints
    return {
        "runs": {(run.training_run_id, run.base_model, run.lora_rank) for run in runs},
        "checkpoints": {(each.tinker_path, each.size_bytes, each.time) for each in checkpoints},
    }


def lose_catalog(server: Server) -> None:
    """Stop the server, delete its catalog and start it again."""
    server.stop()
    for file in server.state_dir.glob("catalog.db*"):
        file.unlink()
    server.start()


def test_a_rebuilt_catalog_lists_runs_and_checkpoints_and_suspended_runs_resume(
    own_server: Server,
) -> None:
    client = own_server.client()
    training = client.create_lora_training_client(MODEL, rank=4).result()
    step(training)
    path = training.save_state("two").result().path
    training.save_weights_for_sampler("public").result()
    other = client.create_lora_training_client(MODEL, rank=8).result()
    damaged = other.save_state("damaged").result().path
    other.save_state("good").result()
    project = own_server.new_project("team")
    own_server.rest().assign_session_project(client.holder.get_session_id(), project).result()
    before = listed(own_server)
    assert "the catalog is empty" not in own_server.log

    lose_catalog(own_server)
    manifest = own_server.state_dir / "checkpoints/runs" / other.model_id / "weights/damaged"
    (manifest / "manifest.json").write_text("{")

    assert "the catalog is empty, but the store contains checkpoints" in own_server.log
    assert "catalog rebuild --state-dir" in own_server.log
    assert listed(own_server) == {"runs": set(), "checkpoints": set()}
    printed = own_server.command("catalog", "rebuild")
    again = own_server.command("catalog", "rebuild")
    assert printed == again
    assert "found 2 training runs and 3 checkpoints" in printed
    assert "weights/damaged can't be read: its manifest is damaged" in printed
    after = listed(own_server)
    assert after["runs"] == before["runs"]
    sound = {each for each in after["checkpoints"] if each[0] != damaged}
    assert sound == {each for each in before["checkpoints"] if each[0] != damaged}
    assert {each[0] for each in after["checkpoints"] - sound} == {damaged}
    assert own_server.request("GET", "/api/v1/projects").json() == {"projects": []}
    resumed = own_server.client().create_training_client_from_state_with_optimizer(path).result()
    assert step(training) == step(resumed)


@pytest.mark.long
def test_a_run_that_was_not_suspended_is_reported_lost_after_a_rebuild(own_server: Server) -> None:
    training = own_server.client().create_lora_training_client(MODEL, rank=4).result()
    path = training.save_state("saved").result().path
    own_server.kill_heads()

    lose_catalog(own_server)
    own_server.command("catalog", "rebuild")

    with pytest.raises(tinker.APIStatusError) as lost:
        step(training)
    assert path in str(lost.value)
