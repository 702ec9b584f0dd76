"""Runs of several owners on the clusters of a pool. The test takes the role of the operator."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_testing.clients.objects_of_others import check_none_is_found, objects_of
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.provider_world import Head, World, a_base_model
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model

pytestmark = pytest.mark.slow

MODEL = "tiny/shared"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@dataclass
class Pool:
    """A pool with one cluster that is ready."""

    world: World
    head: Head
    cluster: str
    model_name: str = MODEL

    def a_run(self, server: Server, key: str = API_KEY) -> tinker.TrainingClient:
        """Create a run and give it a place."""
        self.world.wait_for_model(server, self.model_name)
        known = self.world.sessions()
        waiting = server.client(key).create_lora_training_client(self.model_name, rank=4, seed=1)
        self.world.place(self.world.new_session(known), self.cluster)
        return waiting.result()


def a_pool_model(name: str, namespace: str, model_name: str) -> dict[str, Any]:
    shared = a_base_model(name, namespace, model_name)
    shared["spec"] |= {"sharing": "Shared", "pool": {"slotsPerCluster": 8}}
    return shared


@pytest.fixture(scope="module")
def pool(world: World) -> Iterator[Pool]:
    world.cluster.apply(a_pool_model("shared", world.namespace, MODEL))
    head = world.a_head(MODEL)
    yield Pool(world, head, world.a_pool_cluster("pool-a", head))
    world.cluster.delete("basemodel", "shared", world.namespace)


@pytest.fixture(scope="module")
def stranger(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("pool-stranger")


def test_two_owners_train_and_sample_on_one_cluster_as_if_each_were_alone(
    pool: Pool, world: World, server: Server, other: Server, stranger: str
) -> None:
    known = world.sessions()

    mine, theirs = pool.a_run(server), pool.a_run(other, stranger)
    losses = [[step(mine), step(mine)], [step(theirs), step(theirs)]]
    sampler = theirs.save_weights_and_get_sampling_client().result()
    sampled = sampler.compute_logprobs(PROMPT).result()

    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][1] < losses[0][0]
    assert len(sampled) == 3
    made = [world.session(name)["spec"] for name in set(world.sessions()) - set(known)]
    assert [spec["sharing"] for spec in made] == ["Shared"] * 2
    assert {spec["owner"] for spec in made} == {"bootstrap", "pool-stranger"}


def test_an_object_of_another_owner_in_the_same_pool_is_like_one_that_does_not_exist(
    world: World, server: Server, stranger: str, tmp_path: Path
) -> None:
    shared = a_pool_model("chat", world.namespace, CHAT_MODEL)
    world.cluster.apply(shared)
    head = world.a_head(CHAT_MODEL, model=a_chat_model(tmp_path / "chat"))
    pool = Pool(world, head, world.a_pool_cluster("pool-chat", head), CHAT_MODEL)
    program = {"base_model": CHAT_MODEL, "image": "programs:1", "module": "theirs"}
    mine, own = pool.a_run(server), pool.a_run(server, stranger)
    step(own)

    theirs = objects_of(mine, server, program)

    check_none_is_found(server, theirs, own, stranger)


def test_a_run_without_a_place_reports_what_it_waits_for(
    pool: Pool, world: World, server: Server
) -> None:
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    promise = server.post("create_model", {**create, "lora_config": {"rank": 4}}).json()
    name = world.session_of(f"{session_id}:train:0")
    world.say(name, (ConditionType.READY, "False", Reason.POOL_FULL, "all 8 slots are taken"))

    def waiting() -> dict[str, object]:
        return server.post("retrieve_future", {"request_id": promise["request_id"]}).json()

    wait_until(lambda: waiting()["queue_state"] == "paused_capacity", "the status to be seen")

    assert waiting()["queue_state_reason"] == (
        f"TrainingSession {name}: PoolFull: all 8 slots are taken"
    )
    world.place(name, pool.cluster)
    assert server.result(promise["request_id"]).json()["model_id"] == f"{session_id}:train:0"


@pytest.fixture
def impatient(world: World) -> Iterator[Server]:
    """Run a replica that suspends the models of clients after a second without heartbeats."""
    server = world.server("impatient", TINKERCLOUD_SESSION_SILENCE_SECONDS="1")
    server.start()
    yield server
    server.clients.close()
    server.stop()


def test_the_model_of_a_silent_client_leaves_the_memory_of_the_cluster_until_it_is_used_again(
    pool: Pool, world: World, server: Server, impatient: Server
) -> None:
    session_id = impatient.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    lora = {"rank": 4, "seed": 1}
    promise = impatient.post("create_model", {**create, "lora_config": lora}).json()
    model_id = f"{session_id}:train:0"
    world.place(world.session_of(model_id), pool.cluster)
    assert impatient.result(promise["request_id"]).json()["model_id"] == model_id

    def state() -> str:
        usage = impatient.request("GET", f"/api/v1/session_usage/{session_id}").json()
        return str(usage["models"][0]["state"])

    wait_until(lambda: state() == "suspended", "the model in the store")
    alone = pool.a_run(server)
    again = tinker.TrainingClient(server.client().holder, 0, model_id, info=alone.get_info())

    assert step(again) == pytest.approx(step(alone), abs=1e-5)
    assert state() == "in memory"


def test_samplers_of_the_base_model_share_a_cluster_too(
    pool: Pool, world: World, server: Server
) -> None:
    alone = server.new_key("only-samples")
    known = world.sessions()
    sampler = server.client(alone).create_sampling_client(base_model=MODEL).result()
    waiting = sampler.compute_logprobs(PROMPT)
    name = world.new_session(known)

    world.place(name, pool.cluster)

    assert len(waiting.result()) == 3
    spec = world.session(name)["spec"]
    assert (spec["role"], spec["sharing"]) == ("Sampler", "Shared")


@dataclass
class Run:
    """A run on a cluster of its own, which a test may end."""

    training: tinker.TrainingClient
    session: str
    cluster: str
    head: Head


@pytest.fixture
def placed(pool: Pool, world: World, server: Server) -> Run:
    """Return a run on another cluster than `pool.cluster`."""
    head = world.a_head(MODEL)
    cluster = world.a_pool_cluster(f"pool-of-head-{len(world.heads)}", head)
    known = world.sessions()
    waiting = server.client().create_lora_training_client(MODEL, rank=4, seed=1)
    session = world.new_session(known)
    world.place(session, cluster)
    return Run(waiting.result(), session, cluster, head)


def test_a_run_that_was_saved_with_its_cluster_continues_on_another(
    pool: Pool, world: World, server: Server, placed: Run
) -> None:
    alone = pool.a_run(server)
    expected = [step(alone) for _ in range(3)]
    losses = [step(placed.training)]

    placed.head.stop()
    world.cluster.delete("trainingsession", placed.cluster, world.namespace)
    world.place(placed.session, pool.cluster)
    losses += [step(placed.training), step(placed.training)]

    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_run_whose_head_was_lost_fails_instead_of_continuing_with_older_weights(
    pool: Pool, world: World, placed: Run
) -> None:
    step(placed.training)

    placed.head.kill()
    world.make_ready(placed.cluster, pool.head, incarnation="pod-b.0")

    with pytest.raises((tinker.TinkerError, ValueError), match="session head stopped"):
        step(placed.training)
