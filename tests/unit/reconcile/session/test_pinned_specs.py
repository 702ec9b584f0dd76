"""Running pods keep the spec they started with until the session is suspended and resumed."""

import json
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.decide.session.actions import Action, Apply
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_testing.resources.session_world import (
    OFFERS,
    RAY_CLUSTER,
    SETTINGS,
    World,
    a_world,
    ranks_in_pods,
)
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    SAMPLERS,
    TRAINERS,
    a_base_model,
    a_session,
)

CONFIG = """{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
 "vocab_size": 151936, "num_attention_heads": 14, "num_key_value_heads": 2,
 "intermediate_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": true}"""
PLANNED = a_base_model(trainer={**TRAINERS, "planning": {"gpu": "H100", "config": CONFIG}})
PLACED = a_base_model(
    source={"hub": "a/b", "secretName": "hub"},
    trainer=TRAINERS,
    sampler=SAMPLERS,
    tokenizer="a/b",
    limits={"maxLoraRank": 8, "maxSessionsPerOwner": 1},
    placement={"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k", "operator": "Exists"}]},
)
COMBINATIONS: dict[str, tuple[BaseModelSpec, dict[str, Any]]] = {
    **{name: (offer, {}) for name, offer in OFFERS.items()},
    "planned": (PLANNED, {}),
    "placed": (PLACED, {}),
    "fewer trainers": (OFFERS["workers"], {"trainer": {"replicas": 1}}),
    "samplers": (OFFERS["engines"], {"role": "Sampler", "lora": None}),
    "colocated engines on their own": (
        a_base_model(trainer=TRAINERS, sampler=COLOCATED),
        {"role": "Sampler", "lora": None},
    ),
}


def accepted(world: World) -> tuple[str, str, str]:
    found = find(world.status.conditions, ConditionType.ACCEPTED)
    assert found is not None
    return found.status, found.reason, found.message


@pytest.mark.parametrize("name", COMBINATIONS)
def test_without_changes_nothing_is_pending(name: str) -> None:
    offered, asked = COMBINATIONS[name]
    world = World(offered)
    world.change(spec=a_session(**asked))

    world.happen("it settles")

    assert world.status.phase == "Ready"
    assert accepted(world) == ("True", Reason.ACCEPTED, "")
    assert labels.STARTED_WITH in world.children[RAY_CLUSTER]["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("offer", "event", "changed"),
    [
        ("workers", "its owner requests one trainer", "trainer.replicas (2, now 1)"),
        ("queue", "its owner requests one trainer", "trainer.replicas (2, now 1)"),
        ("colocated engines", "its owner requests one trainer", "sampler.replicas (4, now 2)"),
        ("engines", "the BaseModel shrinks", "sampler.replicas (2, now 1)"),
    ],
)
def test_changed_replicas_are_applied_after_suspend_and_resume(
    offer: str, event: str, changed: str
) -> None:
    world = a_world(offer, "it settles")
    children, pods = world.children, dict(world.pods)

    world.happen(event, "it settles")

    status, reason, message = accepted(world)
    assert (status, reason) == ("True", Reason.CHANGE_WAITS)
    assert message.startswith("the running pods use an earlier spec; suspend and resume")
    assert changed in message
    assert world.status.phase == "Ready"
    assert (world.children, world.pods) == (children, pods)
    world.happen("its owner suspends it", "it settles", "its owner resumes it", "it settles")
    assert accepted(world)[1] == Reason.ACCEPTED
    assert world.status.phase == "Ready"
    assert len(world.pods) < len(pods)
    assert world.head_config is not None
    assert world.head_config["trainer"]["ranks"] == ranks_in_pods(world)


def test_a_replacement_pod_equals_the_lost_one() -> None:
    world = a_world("workers", "it settles")
    described = world.children[RAY_CLUSTER]["spec"]
    image = {"head": world.offered.head.model_copy(update={"image": "worker:2"})}
    world.change(base_model=world.offered.model_copy(update=image))

    world.happen("the trainers are lost", "it settles", "children are edited", "it settles")

    assert world.children[RAY_CLUSTER]["spec"] == described
    assert "head.image (worker:1, now worker:2)" in accepted(world)[2]


def test_a_changed_network_is_applied_after_suspend_and_resume() -> None:
    world = a_world("workers", "it settles")
    described = world.children[RAY_CLUSTER]["spec"]
    network = {
        "extendedResources": [{"name": "rdma/hca", "count": 1}],
        "environment": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
    }
    world.change(base_model=a_base_model(trainer=TRAINERS | network, sampler=SAMPLERS))

    world.happen("it settles")

    assert world.children[RAY_CLUSTER]["spec"] == described
    assert "trainer.environment" in accepted(world)[2]
    assert "trainer.extendedResources" in accepted(world)[2]
    world.happen("its owner suspends it", "it settles", "its owner resumes it", "it settles")
    assert accepted(world)[1] == Reason.ACCEPTED
    assert "rdma/hca" in json.dumps(world.children[RAY_CLUSTER]["spec"])


def test_a_session_of_an_older_operator_has_no_pending_changes() -> None:
    world = a_world("workers", "it settles")
    annotations = world.children[RAY_CLUSTER]["metadata"]["annotations"]
    written = json.loads(annotations[labels.STARTED_WITH])
    for shape in ("trainer", "sampler"):
        del written[shape]["extendedResources"], written[shape]["environment"]
    annotations[labels.STARTED_WITH] = json.dumps(written)
    described = world.children[RAY_CLUSTER]["spec"]

    world.happen("it settles")

    assert accepted(world) == ("True", Reason.ACCEPTED, "")
    assert world.children[RAY_CLUSTER]["spec"] == described


@pytest.mark.parametrize("offer", ["workers", "queue"])
def test_a_restarted_head_gets_the_configuration_it_had(offer: str) -> None:
    world = a_world(offer, "it settles")
    newer = SETTINGS.model_copy(update={"drain_seconds": 21})

    plan = reconcile(world.observe(), newer)
    world.happen("its owner suspends it", "it settles", "its owner resumes it")
    resumed = reconcile(world.observe(), newer)

    assert not any(head_config_of(action) for action in plan.actions)
    [config] = filter(None, map(head_config_of, resumed.actions))
    assert config["timings"]["drain_seconds"] == newer.drain_seconds


def head_config_of(action: Action) -> dict[str, Any] | None:
    """Return the head configuration that an action applies."""
    if isinstance(action, Apply) and action.manifest["kind"] == "ConfigMap":
        config: dict[str, Any] = json.loads(action.manifest["data"]["head.json"])
        return config
    return None


def test_a_session_that_has_not_started_is_updated_at_once() -> None:
    world = a_world("workers", "the operator reconciles")

    world.happen("its owner requests one trainer", "the operator reconciles")

    [trainers, _] = world.children[RAY_CLUSTER]["spec"]["workerGroupSpecs"]
    assert trainers["replicas"] == 1
    assert accepted(world)[1] == Reason.ACCEPTED


def test_changes_that_do_not_affect_pods_apply_at_once() -> None:
    world = a_world("workers", "it settles")
    policy = a_base_model(sessions={"idle": {"timeoutSeconds": 60}}).sessions
    world.change(base_model=world.offered.model_copy(update={"sessions": policy}))

    world.happen("it settles")
    assert accepted(world)[1] == Reason.ACCEPTED
    world.happen("a minute passes", "a minute passes", "a minute passes", "it settles")

    assert world.status.phase == "Suspended"


def test_a_session_that_kueue_holds_back_is_updated_at_once() -> None:
    world = a_world("queue", "the operator reconciles")
    assert world.children[RAY_CLUSTER]["spec"]["suspend"]

    world.happen("its owner requests one trainer", "the operator reconciles")

    [trainers] = world.children[RAY_CLUSTER]["spec"]["workerGroupSpecs"]
    assert trainers["replicas"] == 1
    assert accepted(world)[1] == Reason.ACCEPTED


def test_a_session_without_its_base_model_still_counts_pods_and_gpus() -> None:
    world = a_world("workers", "it settles")
    assert (world.status.gpus, world.status.workers.trainers) == (10, "2/2")

    world.happen("the BaseModel is deleted", "the operator reconciles")
    assert (world.status.phase, world.status.gpus) == ("Ready", 10)
    world.happen("the trainers are lost", "a pod advances", "the operator reconciles")

    assert (world.status.phase, world.status.gpus) == ("Provisioning", 10)
    assert world.status.workers.trainers == "0/2"
    assert "2 of 4 pods" in (world.status.message or "")


def test_lost_children_of_a_session_without_its_base_model_are_recreated() -> None:
    world = a_world("workers", "it settles", "the BaseModel is deleted", "the Service is deleted")

    world.happen("it settles")

    assert any(key.kind == "Service" for key in world.children)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "[]",
        '{"modelName": "a"}',
        '{"modelName":"a","source":{},"maxContextLength":16,"head":{"image":"i"},'
        '"trainer":{"replicas":2}}',
        '{"modelName":"a","source":{},"maxContextLength":16,"head":{"image":"i"},'
        '"trainer":{"backend":"megatron"}}',
    ],
    ids=["nothing", "a list", "missing fields", "pods without ranks", "no head configuration"],
)
def test_a_ray_cluster_without_a_readable_pinned_spec_follows_the_current_one(
    written: str,
) -> None:
    world = a_world("workers", "it settles")
    before = dict(world.children[RAY_CLUSTER]["metadata"]["annotations"])
    world.children[RAY_CLUSTER]["metadata"]["annotations"][labels.STARTED_WITH] = written

    world.happen("it settles")

    assert world.children[RAY_CLUSTER]["metadata"]["annotations"] == before
    assert reconcile(world.observe(), SETTINGS).actions == ()
