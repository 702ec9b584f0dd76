"""Names and specs of TrainingSessions, and the options that are allowed."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster.session_spec import (
    attached_model,
    check_options,
    is_of,
    owner_label,
    session_name,
    training_session,
)
from tinkercloud_api.providers.cluster.session_status import (
    BaseModelView,
    TrainingSessionView,
    read_base_model,
    read_session,
)
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_crds.pods.placement import LabelValue
from tinkercloud_crds.training_session import MAX_NAME_LENGTH
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.training_requests import OptimizerConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MODEL = ModelSpec(owner="me", lora=LoraConfig(rank=8, train_unembed=False))
RUN = Placement("3f0c9a52:train:0", "me", "tiny/llama", MODEL)
SAMPLER = Placement("3f0c9a52:sample:1", "me", "tiny/llama")
SESSION_IDS = st.from_regex(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}", fullmatch=True)
MODEL_IDS = st.builds("{}:train:{}".format, SESSION_IDS, st.integers(0, 10**19 - 1))


def a_base_model(**spec: Any) -> BaseModelView:
    required = {
        "modelName": "tiny/llama",
        "source": {"hub": "tiny/llama"},
        "maxContextLength": 512,
        "head": {"image": "head"},
    }
    metadata = {"name": "tiny", "resourceVersion": "1"}
    return read_base_model({"metadata": metadata, "spec": {**required, **spec}})


def a_session(**spec: Any) -> TrainingSessionView:
    metadata = {
        "name": "declared",
        "uid": "u",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    lora = {"rank": 8, "trainUnembed": False}
    declared = {"baseModel": "tiny/llama", "owner": "me", "lora": lora, **spec}
    return read_session({"metadata": metadata, "spec": declared})


@given(MODEL_IDS)
def test_a_runs_name_is_one_that_kubernetes_and_kuberay_accept(model_id: str) -> None:
    name = session_name(replace(RUN, target=model_id))

    assert len(name) <= MAX_NAME_LENGTH
    assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name)


@given(MODEL_IDS, MODEL_IDS)
def test_two_runs_have_two_names(one: str, other: str) -> None:
    names = [session_name(replace(RUN, target=model_id)) for model_id in (one, other)]

    assert (names[0] == names[1]) == (one == other)


def test_all_samplers_of_an_owner_and_base_model_have_one_name() -> None:
    again = replace(SAMPLER, target="other:sample:9")
    of_another = [replace(SAMPLER, owner="you"), replace(SAMPLER, base_model="tiny/other")]

    assert session_name(SAMPLER) == session_name(again)
    assert session_name(SAMPLER) not in {session_name(placement) for placement in of_another}


def test_a_session_of_another_run_with_a_colliding_name_is_not_used() -> None:
    mine, other = a_session(modelId=RUN.target), a_session(modelId="other:train:0")

    assert is_of(mine, RUN)
    assert not is_of(other, RUN)


@given(st.text(min_size=1, max_size=200))
def test_every_owner_has_a_label(owner: str) -> None:
    pattern = get_args(LabelValue)[1].metadata[-1].pattern

    assert re.fullmatch(pattern, owner_label(owner))
    assert 0 < len(owner_label(owner)) <= 63


def test_a_run_becomes_a_training_session() -> None:
    placement = replace(
        RUN,
        model=MODEL.model_copy(update={"restore_from": "tinker://s:train:0/weights/a"}),
        options=SessionOptions(queue="research", idle_action="Delete"),
    )
    base_model = a_base_model(sessions={"idle": {"timeoutSeconds": 900}})

    made = training_session(placement, base_model, NOW)

    assert made == {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {
            "name": session_name(RUN),
            "labels": {
                "app.kubernetes.io/managed-by": "tinkercloud",
                "tinkercloud.dev/owner": "me",
            },
            "annotations": {
                "tinkercloud.dev/last-activity": "2026-01-02T03:04:05Z",
                "tinkercloud.dev/created-for": RUN.target,
            },
        },
        "spec": {
            "baseModel": "tiny/llama",
            "owner": "me",
            "modelId": RUN.target,
            "optimizer": "adamw",
            "lora": {
                "rank": 8,
                "trainAttention": True,
                "trainMlp": True,
                "trainUnembed": False,
            },
            "restoreFrom": {"path": "tinker://s:train:0/weights/a", "optimizer": False},
            "queueName": "research",
            "idle": {"timeoutSeconds": 900, "action": "Delete"},
        },
    }


def test_samplers_become_a_session_without_a_trainer() -> None:
    made = training_session(SAMPLER, a_base_model(), NOW)

    assert made["spec"] == {"baseModel": "tiny/llama", "owner": "me", "role": "Sampler"}


def test_a_run_from_a_samplers_weights_states_no_training_checkpoint() -> None:
    model = MODEL.model_copy(update={"restore_from": "tinker://s:train:0/sampler_weights/a"})

    made = training_session(replace(RUN, model=model), a_base_model(), NOW)

    assert "restoreFrom" not in made["spec"]


def test_a_request_that_makes_an_invalid_training_session_is_rejected_by_field() -> None:
    model = MODEL.model_copy(update={"optimizer": OptimizerConfig(type="dimuon")})

    with pytest.raises(InvalidRequest, match=r"optimizer: .*'adamw'"):
        training_session(replace(RUN, model=model), a_base_model(), NOW)


def test_the_queues_of_the_base_model_are_allowed() -> None:
    base_model = a_base_model(placement={"queueName": "own"}, sessions={"queueNames": ["research"]})

    check_options(replace(RUN, options=SessionOptions(queue="own")), base_model)
    check_options(replace(RUN, options=SessionOptions(queue="research")), base_model)
    with pytest.raises(InvalidRequest, match="'other' is not allowed; allowed values: 'own', 'res"):
        check_options(replace(RUN, options=SessionOptions(queue="other")), base_model)


def test_an_unlisted_priority_and_a_too_long_idle_timeout_are_rejected() -> None:
    base_model = a_base_model(sessions={"maxIdleTimeoutSeconds": 600})

    check_options(replace(RUN, options=SessionOptions(idle_timeout=600)), base_model)
    with pytest.raises(InvalidRequest, match="allowed values: none; remove the option"):
        check_options(replace(RUN, options=SessionOptions(priority="high")), base_model)
    with pytest.raises(InvalidRequest, match="got 601; base model 'tiny/llama' allows at most"):
        check_options(replace(RUN, options=SessionOptions(idle_timeout=601)), base_model)


SHARED = a_base_model(sharing="Shared", sessions={"queueNames": ["research"]})


def test_lora_runs_and_samplers_of_a_base_model_with_a_pool_share_its_clusters() -> None:
    made = [training_session(each, SHARED, NOW)["spec"] for each in (RUN, SAMPLER)]

    assert [spec["sharing"] for spec in made] == ["Shared", "Shared"]


def test_full_fine_tuning_of_a_base_model_with_a_pool_gets_its_own_pods() -> None:
    whole = replace(RUN, model=MODEL.model_copy(update={"lora": None}))

    assert "sharing" not in training_session(whole, SHARED, NOW)["spec"]


def test_options_of_pods_are_rejected_for_a_run_without_pods_of_its_own() -> None:
    chosen = replace(RUN, options=SessionOptions(queue="research"))

    with pytest.raises(InvalidRequest, match=r"tinkercloud.dev/queue: .* shared pool"):
        check_options(chosen, SHARED)


def attach(session: TrainingSessionView | None, **changes: Any) -> ModelSpec:
    return attached_model(
        replace(RUN, options=SessionOptions(session="declared", **changes)), session
    )


def test_an_attached_run_takes_seed_and_checkpoint_from_the_declaration() -> None:
    session = a_session(
        lora={"rank": 8, "trainUnembed": False, "seed": 7},
        restoreFrom={"path": "tinker://s:train:0/weights/a", "optimizer": True},
    )

    model = attach(session)

    assert model.lora is not None
    assert (model.lora.seed, model.lora.rank) == (7, 8)
    assert (model.restore_from, model.restore_optimizer) == ("tinker://s:train:0/weights/a", True)


@pytest.mark.parametrize(
    ("spec", "difference"),
    [
        (
            {"baseModel": "tiny/other"},
            "baseModel is 'tiny/other' in the session, but 'tiny/llama' was",
        ),
        (
            {"lora": {"rank": 64}},
            "lora.rank is 64 in the session, but 8 was requested; lora.trainUnembed is True",
        ),
        ({"lora": None}, "lora is 'full fine-tuning' in the session, but 'LoRA' was requested"),
        ({"modelId": "x:train:0"}, "spec.modelId must be unset"),
        ({"role": "Sampler", "lora": None}, "its spec.role must be Trainer"),
    ],
)
def test_a_declaration_that_does_not_match_is_rejected_with_the_differences(
    spec: dict[str, Any], difference: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(difference)):
        attach(a_session(**spec))


def test_a_missing_session_and_one_of_another_owner_give_the_same_error() -> None:
    with pytest.raises(NotFound) as missing:
        attach(None)
    with pytest.raises(NotFound) as theirs:
        attach(a_session(owner="you"))

    assert str(missing.value) == str(theirs.value)


def test_an_attached_run_cannot_set_other_options() -> None:
    with pytest.raises(
        InvalidRequest, match=r"tinkercloud\.dev/queue: .*itself; remove the option"
    ):
        attach(a_session(), queue="research")
