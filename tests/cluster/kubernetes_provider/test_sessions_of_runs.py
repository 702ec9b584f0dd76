"""The TrainingSession of a run: created, queued, rejected, declared, deleted."""

import pytest
import tinker
from tinker import types

from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.provider_world import (
    MODEL,
    OWNER,
    RULES,
    World,
    a_declared_session,
    access,
)
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow


def test_a_created_model_is_a_training_session_that_ends_with_its_client(
    world: World, server: Server
) -> None:
    known = world.sessions()

    with server.client() as client:
        tags = {"tinkercloud.dev/queue": "research", "tinkercloud.dev/idle-timeout": "600"}
        waiting = client.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata=tags)
        name = world.new_session(known)
        world.make_ready(name, world.head)
        training = waiting.result()
        losses = [step(training), step(training)]
        sampler = training.save_weights_and_get_sampling_client().result()
        sampled = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
        made = world.session(name)

    assert losses[1] < losses[0]
    assert len(sampled) == 3
    assert made["spec"]["modelId"] == training.model_id
    assert made["spec"]["lora"]["rank"] == 4
    assert made["spec"]["queueName"] == "research"
    assert made["spec"]["idle"] == {"timeoutSeconds": 600, "action": "Suspend"}
    assert made["metadata"]["labels"]["tinkercloud.dev/owner"] == OWNER
    world.cluster.wait_for(f"trainingsession/{name}", "delete", world.namespace)


def test_a_queued_session_reports_what_it_waits_for(world: World, server: Server) -> None:
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    promise = server.post("create_model", {**create, "lora_config": {"rank": 4}}).json()
    name = world.session_of(f"{session_id}:train:0")
    world.say(name, (ConditionType.READY, "False", Reason.QUEUED, "behind 3 others in research"))

    def waiting() -> dict[str, object]:
        return server.post("retrieve_future", {"request_id": promise["request_id"]}).json()

    wait_until(lambda: waiting()["queue_state"] == "paused_capacity", "the status to be seen")

    assert waiting()["queue_state_reason"] == (
        f"TrainingSession {name}: Queued: behind 3 others in research"
    )


@pytest.mark.parametrize(
    ("reason", "category"),
    [(Reason.NOT_ALLOWED, "user"), (Reason.NEVER_FITS, "server")],
)
def test_a_session_that_never_fits_fails_its_run_at_once(
    world: World, server: Server, reason: Reason, category: str
) -> None:
    known = world.sessions()
    waiting = server.client().create_lora_training_client(MODEL, rank=8)
    name = world.new_session(known)

    world.say(
        name,
        (ConditionType.READY, "False", reason, "needs 16 GPUs"),
        (ConditionType.STALLED, "True", reason, "needs 16 GPUs"),
    )

    with pytest.raises(tinker.RequestFailedError, match=f"{reason}: needs 16 GPUs") as caught:
        waiting.result()
    assert caught.value.category.value == category
    world.cluster.wait_for(f"trainingsession/{name}", "delete", world.namespace)


def test_a_run_over_the_session_limit_of_its_owner_waits_and_reports_its_position(
    world: World, server: Server
) -> None:
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    promise = server.post("create_model", {**create, "lora_config": {"rank": 4}}).json()
    name = world.session_of(f"{session_id}:train:0")
    world.say(name, (ConditionType.READY, "False", Reason.QUOTA_EXCEEDED, "number 2 of those"))

    def waiting() -> dict[str, object]:
        return server.post("retrieve_future", {"request_id": promise["request_id"]}).json()

    wait_until(lambda: waiting()["queue_state"] == "paused_capacity", "the status to be seen")

    assert waiting()["queue_state_reason"] == (
        f"TrainingSession {name}: QuotaExceeded: number 2 of those"
    )
    assert name in world.sessions()


def test_options_that_the_base_model_does_not_allow_are_rejected_before_anything_is_created(
    world: World, server: Server
) -> None:
    known = world.sessions()
    choice = {"tinkercloud.dev/queue": "production"}

    with pytest.raises(tinker.BadRequestError, match=r"'production' is not allowed.*'research'"):
        server.client().create_lora_training_client(MODEL, user_metadata=choice).result()

    assert world.sessions() == known


def test_an_unknown_option_is_rejected_with_the_valid_ones(server: Server) -> None:
    answer = server.post("create_session", {"sdk_version": "1", "tags": ["tinkercloud.dev/gpus=8"]})

    assert answer.status == 400
    assert "valid options: tinkercloud.dev/session, tinkercloud.dev/queue" in answer.detail


def test_a_deleted_session_ends_its_run(world: World, server: Server) -> None:
    known = world.sessions()
    head = world.a_head()
    training = world.a_training_client(server, head)
    [name] = set(world.sessions()) - set(known)
    step(training)

    world.cluster.kubectl("delete", "trainingsession", name, f"--namespace={world.namespace}")
    head.kill()

    with pytest.raises((tinker.TinkerError, ValueError), match="session head stopped"):
        step(training)
    assert name not in world.sessions()


def test_a_client_attaches_to_a_session_declared_in_git(
    world: World, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.cluster.apply(a_declared_session("declared", world.namespace))
    world.make_ready("declared", world.head)
    known = world.sessions()
    monkeypatch.setenv("TINKER_TAGS", "mine,tinkercloud.dev/session=declared")

    with server.client() as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        loss = step(training)

    assert loss > 0
    assert world.sessions() == known


def test_a_client_whose_options_differ_from_the_declared_session_gets_the_difference(
    world: World, server: Server
) -> None:
    world.cluster.apply(a_declared_session("wide", world.namespace, lora={"rank": 64}))
    wanted = {"tinkercloud.dev/session": "wide"}

    with pytest.raises(
        tinker.BadRequestError, match=r"lora\.rank is 64 in the session, but 4 was requested"
    ):
        server.client().create_lora_training_client(MODEL, rank=4, user_metadata=wanted).result()


def test_a_session_of_another_owner_is_not_found(world: World, server: Server) -> None:
    world.cluster.apply(a_declared_session("theirs", world.namespace, owner="somebody"))
    wanted = {"tinkercloud.dev/session": "theirs"}

    with pytest.raises(tinker.NotFoundError, match="does not exist, or belongs to another owner"):
        server.client().create_lora_training_client(MODEL, rank=4, user_metadata=wanted).result()


def test_samplers_without_a_trainer_share_one_session(world: World, server: Server) -> None:
    key = server.new_key("sampling-only")
    known = world.sessions()
    client = server.client(key)
    one = client.create_sampling_client(base_model=MODEL).result()
    text = types.ModelInput.from_ints([5, 6, 7])
    scored = one.compute_logprobs(text)
    name = world.new_session(known)
    world.make_ready(name, world.head)

    two = client.create_sampling_client(base_model=MODEL).result()

    assert scored.result() == two.compute_logprobs(text).result()
    assert world.session(name)["spec"]["role"] == "Sampler"
    assert set(world.sessions()) - set(known) == {name}


def test_a_missing_right_is_named(world: World, server: Server) -> None:
    without = [rule for rule in RULES if rule["resources"] != ["trainingsessions"]]
    reading = {**RULES[0], "verbs": ["get", "list", "watch"]}
    role = access(world.namespace)[1]
    world.cluster.apply({**role, "rules": [*without, reading]})

    with pytest.raises(
        tinker.RequestFailedError, match="chart's Role to the API server's service account"
    ):
        server.client().create_lora_training_client(MODEL, rank=4).result()
    world.cluster.apply(role)
