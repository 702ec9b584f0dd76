"""A server continues what a killed server of the last release has left in an S3 bucket.

`tests/data/states` has one such archive (`tinkercloud_testing.storage.killed_in_a_bucket`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.storage.buckets import a_bucket
from tinkercloud_testing.storage.killed_in_a_bucket import (
    NUM_WAITING,
    STORE,
    Expected,
    settings_of,
    unpack,
)
from tinkercloud_testing.storage.state_of_release import MODEL, continued

(ARCHIVE,) = (Path(__file__).parents[2] / "data" / "states").glob("*-bucket.tar.xz")


@pytest.fixture(scope="module", params=["the same machine", "another machine"])
def left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Expected]]:
    """This tree's server with that bucket, and with the journals of the killed head or without."""
    folder = tmp_path_factory.mktemp("left")
    expected = unpack(ARCHIVE, folder)
    if request.param == "another machine":
        shutil.rmtree(folder / "state" / "heads")
    with a_bucket("127.0.0.1") as bucket:
        bucket.hold(folder / "bucket", STORE)
        models = {MODEL: folder / "model"}
        with a_server(folder / "state", models, settings_of(bucket)) as running:
            yield running, expected


def close(losses: list[float]) -> object:
    # Other processors round differently.
    return pytest.approx(losses, rel=1e-4)


def test_its_runs_are_listed(left: tuple[Server, Expected]) -> None:
    server, expected = left

    listed = server.rest().list_training_runs().result().training_runs

    runs = [each.training_run_id for each in listed]
    assert {expected.idle.model_id, expected.killed.model_id} <= set(runs)


def test_a_run_of_a_silent_client_continues_and_so_does_its_automatic_checkpoint(
    left: tuple[Server, Expected],
) -> None:
    server, expected = left
    load = server.client().create_training_client_from_state_with_optimizer

    # First, because later steps replace it.
    loaded = load(expected.autosave).result()
    training = continued(server, expected.idle)

    assert [step(loaded) for _ in expected.next_losses] == close(expected.next_losses)
    assert [step(training) for _ in expected.next_losses] == close(expected.next_losses)


def test_requests_that_were_confirmed_before_the_kill_are_run_and_the_run_continues(
    left: tuple[Server, Expected],
) -> None:
    server, expected = left
    finished, further = expected.next_losses[:NUM_WAITING], expected.next_losses[NUM_WAITING:]

    training = continued(server, expected.killed)
    losses = [step(training) for _ in further]
    answers = [server.result(each, accept="application/json") for each in expected.waiting]

    assert [answer.json()["metrics"]["loss:sum"] for answer in answers] == close(finished)
    assert losses == close(further)
