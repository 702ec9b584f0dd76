"""What a session gets of its BaseModel, and what a rejection reports."""

from typing import Any

import pytest

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import MAX_MESSAGE_LENGTH, ConditionType, Reason, find
from tinkercloud_crds.pods.placement import Placement
from tinkercloud_crds.pods.shapes import Idle
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.resolved import (
    Rejection,
    ResolvedSpec,
    check_pod_groups,
    idle_policy,
    max_lifetime,
    resolve,
)
from tinkercloud_testing.resource_rules.base_models import BASE_MODEL_RULES
from tinkercloud_testing.resources.session_world import any_apply
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_session,
    observed,
)

OFFERED = a_base_model(
    trainer={**TRAINERS, "replicas": 4, "parallelism": {"tensor": 8}, "maxBatchTokens": 8192},
    sampler={**SAMPLERS, "replicas": 2},
    placement={"queueName": "research", "priorityClassName": "normal"},
    limits={"maxLoraRank": 64, "maxSessionsPerOwner": 3},
    sessions={
        "queueNames": ["urgent"],
        "priorityClassNames": ["high"],
        "maxIdleTimeoutSeconds": 7200,
        "maxLifetimeSeconds": 86400,
    },
)


SETTINGS = Settings()
QUEUED = Placement(node_selector={}, node_affinity=[], tolerations=[], queue_name="research")
WITH_COLOCATED_ENGINES = a_base_model(
    trainer={**TRAINERS, "replicas": 4}, sampler={**COLOCATED, "replicas": 8}
)
"""Four trainer pods of four GPUs, each with two engines of two GPUs."""


def counts(trainers: int | None, engines: int | None) -> Json:
    return {
        "trainer": {"replicas": trainers} if trainers else None,
        "sampler": {"replicas": engines} if engines else None,
    }


def rejection(
    spec: TrainingSessionSpec, base_model: BaseModelSpec | None = OFFERED, sessions: int = 0
) -> Rejection:
    found = resolve(spec, base_model, sessions)
    assert isinstance(found, Rejection)
    return found


def resolved(spec: TrainingSessionSpec, base_model: BaseModelSpec = OFFERED) -> ResolvedSpec:
    found = resolve(spec, base_model, 0)
    assert isinstance(found, ResolvedSpec)
    return found


@pytest.mark.parametrize(
    ("field", "asked", "limit", "spec"),
    [
        ("lora.rank", "65", "64", {"lora": {"rank": 65}}),
        ("trainer.replicas", "5", "4", {"trainer": {"replicas": 5}}),
        ("trainer.maxBatchTokens", "8193", "8192", {"trainer": {"maxBatchTokens": 8193}}),
        ("sampler.replicas", "3", "2", {"sampler": {"replicas": 3}}),
        ("idle.timeoutSeconds", "7201", "7200", {"idle": {"timeoutSeconds": 7201}}),
        ("maxLifetimeSeconds", "86401", "86400", {"maxLifetimeSeconds": 86401}),
        ("queueName", "'mine'", "research, urgent", {"queueName": "mine"}),
        ("priorityClassName", "'top'", "high, normal", {"priorityClassName": "top"}),
        (
            "trainer.replicas",
            "3 pods have 12 ranks",
            "8, the ranks per",
            {"trainer": {"replicas": 3}},
        ),
    ],
)
def test_a_rejection_names_the_field_the_value_and_the_limit(
    field: str, asked: str, limit: str, spec: Json
) -> None:
    rejected = rejection(a_session(**spec))

    assert rejected.reason is Reason.NOT_ALLOWED
    assert rejected.message.startswith(f"spec.{field}: ")
    assert asked in rejected.message
    assert limit in rejected.message


def test_trainers_that_expert_parallelism_does_not_divide_are_rejected() -> None:
    offered = a_base_model(trainer={**TRAINERS, "parallelism": {"expert": 8}})

    plan = reconcile(
        observed(spec=a_session(trainer={"replicas": 1}), base_model=offered), SETTINGS
    )

    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status.message == (
        "spec.trainer.replicas: 1 pods have 4 ranks, but the number of ranks must be a multiple"
        " of 8, the ranks per set of experts"
    )
    assert isinstance(resolve(a_session(trainer={"replicas": 2}), offered, 0), ResolvedSpec)


REFUSED = [
    pytest.param(manifest, id=f"{rule.path}: {what}")
    for rule in BASE_MODEL_RULES
    for what, manifest in rule.refused.items()
    if parsing.base_model(manifest) is not None
]


@pytest.mark.parametrize("manifest", REFUSED)
@pytest.mark.parametrize(
    "asked",
    [{}, {"trainer": {"replicas": 1}}, {"role": "Sampler", "lora": None}],
    ids=["the defaults", "fewer trainers", "samplers"],
)
def test_a_base_model_that_breaks_a_newer_rule_still_yields_a_status(
    manifest: Json, asked: Json
) -> None:
    session = observed(spec=a_session(**asked), base_model=parsing.base_model(manifest))

    plan = reconcile(session, SETTINGS)

    assert plan.status is not None
    assert plan.status.phase == ("Pending" if any_apply(plan) else "Failed")


def test_a_configuration_that_the_head_rejects_is_reported_with_its_message() -> None:
    offered = a_base_model(trainer={"backend": "megatron"})

    plan = reconcile(observed(base_model=offered), SETTINGS)

    assert plan.status is not None
    assert plan.status.message == (
        "the head would reject this BaseModel's configuration: ranks: 0, but backend megatron"
        " requires ranks; set ranks to 1 or more"
    )


def test_a_missing_base_model_is_named() -> None:
    rejected = rejection(a_session(baseModel="Qwen/Qwen4"), None)

    assert rejected.reason is Reason.BASE_MODEL_NOT_FOUND
    assert "spec.baseModel" in rejected.message
    assert "'Qwen/Qwen4'" in rejected.message


@pytest.mark.parametrize(("older", "place"), [(3, 1), (4, 2), (9, 7)])
def test_a_session_over_the_owners_limit_reports_its_queue_position(older: int, place: int) -> None:
    rejected = rejection(a_session(), sessions=older)

    assert rejected.reason is Reason.QUOTA_EXCEEDED
    assert "the limit is 3" in rejected.message
    assert f"this session is number {place} in the" in rejected.message
    assert isinstance(resolve(a_session(), OFFERED, 2), ResolvedSpec)


def test_all_problems_are_reported_at_once() -> None:
    rejected = rejection(a_session(lora={"rank": 65}, queueName="mine"))

    assert "spec.lora.rank" in rejected.message
    assert "spec.queueName" in rejected.message


def test_without_allowed_values_every_choice_is_rejected() -> None:
    rejected = rejection(a_session(queueName="mine"), a_base_model())

    assert rejected.message.endswith("allowed values: none")


def test_a_rejection_of_any_length_fits_the_status() -> None:
    many = [f"queue-{number}-{'q' * 50}" for number in range(64)]
    base_model = a_base_model(sessions={"queueNames": many})

    plan = reconcile(observed(spec=a_session(queueName="q"), base_model=base_model), Settings())

    assert plan.status is not None
    assert len(plan.status.message or "") == MAX_MESSAGE_LENGTH


@pytest.mark.parametrize(
    "spec",
    [
        {"lora": {"rank": 64}},
        {"trainer": {"replicas": 4, "maxBatchTokens": 8192}},
        {"sampler": {"replicas": 2}},
        {"idle": {"timeoutSeconds": 7200}, "maxLifetimeSeconds": 86400},
        {"queueName": "urgent", "priorityClassName": "high"},
        {"queueName": "research", "priorityClassName": "normal"},
    ],
    ids=str,
)
def test_a_value_at_its_limit_is_accepted(spec: Json) -> None:
    assert isinstance(resolve(a_session(**spec), OFFERED, 0), ResolvedSpec)


def test_a_session_without_overrides_gets_the_base_models_values() -> None:
    got = resolved(a_session())

    assert got.trainer == OFFERED.trainer
    assert got.sampler == OFFERED.sampler
    assert got.placement == OFFERED.placement
    assert got.gpus == 4 * 4 + 2 * 2


def test_overrides_apply_and_other_values_come_from_the_base_model() -> None:
    spec = a_session(trainer={"replicas": 2}, sampler={"replicas": 1}, queueName="urgent")

    got = resolved(spec)

    assert got.trainer == OFFERED.trainer.model_copy(update={"replicas": 2})
    assert got.sampler == OFFERED.sampler.model_copy(update={"replicas": 1})
    assert got.placement == OFFERED.placement.model_copy(update={"queue_name": "urgent"})
    assert [(kind.component, kind.count) for kind in got.pods] == [
        ("head", 1),
        ("trainer", 2),
        ("sampler", 1),
    ]


def test_a_sampler_has_no_trainer() -> None:
    got = resolved(a_session(role="Sampler", lora=None))

    assert got.trainer is None
    assert got.gpus == 4


def test_colocated_samplers_request_no_gpus_of_their_own() -> None:
    base_model = a_base_model(trainer=TRAINERS, sampler=COLOCATED)

    assert resolved(a_session(), base_model).gpus == 8


@pytest.mark.parametrize(
    ("sampler", "lacked"),
    [
        ({"image": None}, "sampler.image: required for engines"),
        ({"engines": None}, "sampler.engines.deviceClassName: required for colocated engines"),
        ({"gpusPerReplica": 0}, "sampler.gpusPerReplica: colocated engines require 1 or more"),
    ],
    ids=["an image", "a class of devices", "GPUs"],
)
def test_engine_fields_that_older_crds_did_not_require_are_checked(
    sampler: Json, lacked: str
) -> None:
    offered = a_base_model(trainer=TRAINERS, sampler=COLOCATED | sampler)

    rejected = rejection(a_session(), offered)

    assert rejected.reason is Reason.NOT_ALLOWED
    assert rejected.message.startswith(f"the BaseModel's {lacked}")


@pytest.mark.parametrize(
    ("trainers", "asked", "held"),
    [(None, None, 8), (4, 8, 8), (2, None, 4), (2, 4, 4), (1, 2, 2)],
)
def test_the_number_of_colocated_engines_follows_the_trainers(
    trainers: int | None, asked: int | None, held: int
) -> None:
    got = resolved(a_session(**counts(trainers, asked)), WITH_COLOCATED_ENGINES)

    assert got.sampler.replicas == held
    assert got.engines_per_trainer == 2
    assert got.samplers == 0


@pytest.mark.parametrize(("trainers", "asked", "held"), [(None, 4, 8), (2, 8, 4), (2, 3, 4)])
def test_an_explicit_number_of_colocated_engines_must_match(
    trainers: int | None, asked: int, held: int
) -> None:
    rejected = rejection(a_session(**counts(trainers, asked)), WITH_COLOCATED_ENGINES)

    assert rejected.reason is Reason.NOT_ALLOWED
    assert rejected.message == (
        f"spec.sampler.replicas: got {asked}, but the BaseModel's engines run in the trainer pods,"
        f" and {trainers or 4} trainer pods hold {held} engines; omit this field, and"
        " set spec.trainer.replicas instead"
    )


def test_a_sampling_session_may_have_fewer_engines() -> None:
    spec = a_session(role="Sampler", lora=None, sampler={"replicas": 3})

    assert resolved(spec, WITH_COLOCATED_ENGINES).samplers == 3


def test_trainer_pods_with_engines_are_limited_by_kueues_pod_groups() -> None:
    base_model = WITH_COLOCATED_ENGINES.model_copy(update={"placement": QUEUED})

    assert isinstance(check_pod_groups(resolved(a_session(), base_model), 5), ResolvedSpec)
    rejected = check_pod_groups(resolved(a_session(), base_model), 4)

    assert isinstance(rejected, Rejection)
    assert rejected.message.startswith("spec.trainer.replicas: with 4 pods for engines")
    assert rejected.message.endswith("request at most 3")


@pytest.mark.parametrize(
    ("asked", "allowed", "granted"),
    [(None, None, None), (60, None, 60), (None, 600, 600), (60, 600, 60), (600, 600, 600)],
)
def test_the_shorter_lifetime_wins(
    asked: int | None, allowed: int | None, granted: int | None
) -> None:
    base_model = a_base_model(sessions={"maxLifetimeSeconds": allowed})

    assert max_lifetime(a_session(maxLifetimeSeconds=asked), base_model) == granted


@pytest.mark.parametrize(
    ("own", "offered", "policy"),
    [
        ({"timeoutSeconds": 60}, {"idle": {"timeoutSeconds": 600}}, Idle(timeout_seconds=60)),
        (None, {"idle": {"timeoutSeconds": 600}}, Idle(timeout_seconds=600)),
        (None, {}, Idle()),
    ],
)
def test_the_idle_policy_of_a_session_takes_precedence(
    own: Any, offered: Json, policy: Idle
) -> None:
    assert idle_policy(a_session(idle=own), a_base_model(sessions=offered)) == policy


def test_the_idle_policy_is_unknown_only_without_a_base_model() -> None:
    assert idle_policy(a_session(), None) is None
    assert idle_policy(a_session(idle={"timeoutSeconds": 60}), None) == Idle(timeout_seconds=60)


@pytest.mark.parametrize(
    ("engines", "session", "most"),
    [(7, {}, 6), (8, {"role": "Sampler", "lora": None}, 7)],
    ids=["a session that trains", "a sampling session"],
)
def test_engines_are_limited_by_kueues_pod_groups(engines: int, session: Json, most: int) -> None:
    offered = a_base_model(
        trainer=TRAINERS,
        sampler={**ENGINES, "replicas": engines},
        placement={"queueName": "research"},
    )
    asked, granted = a_session(**session), a_session(**session, sampler={"replicas": most})

    rejected = check_pod_groups(resolved(asked, offered), max_groups=8)
    allowed = check_pod_groups(resolved(granted, offered), max_groups=8)

    assert isinstance(rejected, Rejection)
    assert rejected.reason is Reason.NOT_ALLOWED
    assert f"spec.sampler.replicas: with {engines} pods for engines" in rejected.message
    assert rejected.message.endswith(f"request at most {most}")
    assert isinstance(allowed, ResolvedSpec)


def test_without_a_queue_pod_groups_are_not_limited() -> None:
    no_queue = a_base_model(trainer=TRAINERS, sampler={**ENGINES, "replicas": 30})

    assert isinstance(check_pod_groups(resolved(a_session(), no_queue), max_groups=8), ResolvedSpec)


def test_a_session_with_too_many_engines_for_its_queue_is_stalled() -> None:
    offered = a_base_model(
        trainer=TRAINERS,
        sampler={**ENGINES, "replicas": 20},
        placement={"queueName": "research"},
    )

    plan = reconcile(observed(base_model=offered), Settings(kueue_groups=18))

    stalled = find(plan.status.conditions, ConditionType.STALLED) if plan.status else None
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "NotAllowed")
    assert "request at most 16" in stalled.message
