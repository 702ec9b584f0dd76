"""Changes made through one API server are visible in all others."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.provider_world import MODEL, World
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow


def test_another_replica_serves_a_run_it_did_not_create(
    world: World, server: Server, other: Server
) -> None:
    training = world.a_training_client(server)
    step(training)

    answer = other.result(f"{training.model_id}:1")
    info = other.post("get_info", {"model_id": training.model_id})

    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert info.json()["model_name"] == MODEL


def test_a_run_created_through_one_replica_is_trained_and_listed_through_another(
    world: World, server: Server, other: Server
) -> None:
    made = world.a_training_client(server)
    holder = other.client().holder
    there = tinker.TrainingClient(holder, 0, made.model_id, info=made.get_info())

    losses = [step(there), step(there)]
    saved = there.save_state("from-two").result().path
    runs = other.rest().list_training_runs(limit=100).result().training_runs

    assert losses[1] < losses[0]
    assert made.model_id in [run.training_run_id for run in runs]
    assert server.rest().get_weights_info_by_tinker_path(saved).result().lora_rank == 4


def test_a_model_requested_from_two_replicas_concurrently_is_created_once(
    world: World, server: Server, other: Server
) -> None:
    known = world.sessions()
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
    }

    with ThreadPoolExecutor(8) as pool:
        promises = list(pool.map(lambda each: each.post("create_model", body), [server, other] * 4))
        name = world.new_session(known)
        world.make_ready(name, world.head)
        [request_id] = {str(promise.json()["request_id"]) for promise in promises}
        results = list(pool.map(lambda each: each.result(request_id), [server, other]))

    assert [result.json()["model_id"] for result in results] == [f"{session_id}:train:0"] * 2
    assert set(world.sessions()) - set(known) == {name}
