"""What the operator chooses when a BaseModel leaves open how its model is split."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_crds.base_model import BaseModelSpec, Limits, Pool
from tinkercloud_crds.conditions import MAX_MESSAGE_LENGTH, ConditionType, Reason, find
from tinkercloud_crds.pods.shapes import Parallelism, SamplerShape
from tinkercloud_operator.children import support_objects
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec, resolve
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    SAMPLERS,
    Json,
    a_base_model,
    a_build,
    a_session,
    observed,
)

MODELS = json.loads((Path(__file__).parent / "public_models.json").read_text())
LARGE, SMALL = "Qwen/Qwen2.5-72B", "Qwen/Qwen3-8B"


def an_open_base_model(
    name: str = LARGE, gpu: str = "H100", replicas: int = 2, **trainer: Any
) -> BaseModelSpec:
    planning = {"gpu": gpu, "config": json.dumps(MODELS[name]["config"])}
    counts = {"backend": "megatron", "replicas": replicas, "gpusPerReplica": 4}
    return a_base_model(
        trainer={**counts, "planning": planning, "maxBatchTokens": 1 << 20, **trainer},
        sampler={**SAMPLERS, "gpusPerReplica": 16 if gpu == "L4" else 8},
        maxContextLength=8192,
    )


def with_sampler(base_model: BaseModelSpec, sampler: Json, **fields: Any) -> BaseModelSpec:
    update = {"sampler": SamplerShape.model_validate(sampler), **fields}
    return base_model.model_copy(update=update)


def chosen(base_model: BaseModelSpec, **session: Any) -> ResolvedSpec:
    shape = resolve(a_session(**session), base_model, 0)
    assert isinstance(shape, ResolvedSpec), shape.message
    return shape


def parallelism(base_model: BaseModelSpec, **session: Any) -> Parallelism:
    trainer = chosen(base_model, **session).trainer
    assert trainer is not None
    return trainer.parallelism


def refusal(base_model: BaseModelSpec) -> Rejection:
    found = resolve(a_session(), base_model, 0)
    assert isinstance(found, Rejection)
    return found


def test_a_model_is_split_over_as_few_gpus_as_hold_it() -> None:
    assert parallelism(an_open_base_model(LARGE)) == Parallelism(tensor=4)
    assert parallelism(an_open_base_model(SMALL)) == Parallelism()


def test_the_page_shows_the_plan_in_a_session_status() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "kubernetes-sessions.md").read_text()
    shown = page.split(".status.plan}'\n", 1)[1].split("...\n", 1)[0]
    base_model = an_open_base_model(gpusPerReplica=8).model_copy(
        update={"max_context_length": 32768}
    )

    status_plan = chosen(base_model, lora={"rank": 32}).plan
    assert status_plan is not None
    assert status_plan.startswith(shown)


def test_smaller_gpus_divide_a_model_further() -> None:
    on_small = parallelism(an_open_base_model(LARGE, "A100-40"))

    assert on_small.tensor * on_small.pipeline * on_small.context > 4


def test_a_session_of_fewer_pods_gets_a_plan_of_its_own() -> None:
    ranks = parallelism(an_open_base_model(LARGE, "A100-40"), trainer={"replicas": 2})

    with pytest.raises(AssertionError, match="does not fit on 4xA100-40"):
        chosen(an_open_base_model(LARGE, "A100-40"), trainer={"replicas": 1})
    assert 8 % (ranks.tensor * ranks.pipeline * ranks.context) == 0


def test_with_engines_on_its_gpus_a_session_of_fewer_pods_is_refused_by_name() -> None:
    sharing = with_sampler(an_open_base_model(), COLOCATED)

    found = resolve(a_session(trainer={"replicas": 1}), sharing, 0)

    assert isinstance(found, Rejection)
    assert found.reason is Reason.NOT_ALLOWED
    assert found.message.startswith(
        "spec.trainer.replicas: got 1, but the BaseModel plans its parallelism"
    )
    assert "trainer.planning" in found.message
    assert "more memory per GPU than sampler.engines leaves free" in found.message
    for spec in ({}, {"trainer": {"replicas": 2}}):
        assert chosen(sharing, **spec).engines_per_trainer == 2
    sampling = with_sampler(an_open_base_model(SMALL), COLOCATED)
    assert chosen(sampling, role="Sampler", lora=None).samplers == 4


def test_a_full_fine_tune_needs_more_than_an_adapter() -> None:
    adapter = parallelism(an_open_base_model(SMALL, "A100-40"))
    full = parallelism(an_open_base_model(SMALL, "A100-40"), lora=None)

    assert full.tensor * full.pipeline * full.context > (
        adapter.tensor * adapter.pipeline * adapter.context
    )


def test_micro_batches_are_what_fits_and_never_more_than_was_allowed() -> None:
    free = chosen(an_open_base_model(LARGE)).trainer
    bound = chosen(an_open_base_model(LARGE, maxBatchTokens=1024)).trainer

    assert free is not None
    assert bound is not None
    assert 8192 <= free.max_batch_tokens < 1 << 20
    assert bound.max_batch_tokens == 1024


def test_a_sampler_on_the_same_gpus_leaves_room_for_less() -> None:
    alone = chosen(an_open_base_model(LARGE)).trainer

    colocated_trainer = chosen(with_sampler(an_open_base_model(LARGE), COLOCATED)).trainer

    assert alone is not None
    assert colocated_trainer is not None
    assert colocated_trainer.max_batch_tokens < alone.max_batch_tokens


def test_the_larger_the_adapters_of_an_engine_on_the_same_gpus_the_less_room_it_leaves() -> None:
    tokens = []
    for rank in (32, 256):
        limits = Limits(max_lora_rank=rank)
        offered = with_sampler(an_open_base_model(LARGE), COLOCATED, limits=limits)
        trainer = chosen(offered).trainer
        assert trainer is not None
        tokens.append(trainer.max_batch_tokens)

    assert tokens[1] < tokens[0]


def test_the_head_is_configured_with_the_chosen_parallelism() -> None:
    config = support_objects.head_config(a_build(an_open_base_model(LARGE)))

    assert (config.trainer.ranks, config.trainer.tensor_parallel) == (8, 4)


def test_the_status_says_what_was_chosen_and_why() -> None:
    plan = reconcile(observed(base_model=an_open_base_model(LARGE)), Settings())

    assert plan.status is not None
    assert plan.status.plan is not None
    assert "tensor 4: with 2, a GPU would need" in plan.status.plan
    assert "data 2: what is left" in plan.status.plan
    assert len(plan.status.plan) <= MAX_MESSAGE_LENGTH


def test_without_planning_the_status_has_no_plan() -> None:
    plan = reconcile(observed(), Settings())

    assert plan.status is not None
    assert plan.status.plan is None


def seconds(base_model: BaseModelSpec, **session: Any) -> int | None:
    return chosen(base_model, **session).base_model.head.suspend_seconds


def test_the_time_to_save_follows_from_what_is_trained() -> None:
    offered = an_open_base_model(SMALL, replicas=4)

    assert seconds(offered) == 120
    assert seconds(offered, lora=None) == 1080


def test_a_base_model_may_set_the_time_to_save() -> None:
    offered = an_open_base_model(SMALL, replicas=4)
    timed = offered.head.model_copy(update={"suspend_seconds": 240})

    assert seconds(offered.model_copy(update={"head": timed}), lora=None) == 240


def test_the_head_of_a_pool_has_time_to_save_a_model_for_each_slot() -> None:
    offered = an_open_base_model(SMALL).model_copy(
        update={"sharing": "Shared", "pool": Pool(slots_per_cluster=100)}
    )

    assert seconds(offered, role="Sampler", lora=None) is None
    assert (seconds(offered, role="Pool", lora=None) or 0) > 120


def test_a_sampler_needs_no_plan() -> None:
    shape = chosen(an_open_base_model(LARGE, "L4", 1), role="Sampler", lora=None)

    assert shape.plan is None


@pytest.mark.parametrize(
    "session", [{}, {"role": "Sampler", "lora": None}], ids=["runs", "samplers"]
)
@pytest.mark.parametrize("gpus", [1, 2], ids=str)
def test_engines_that_could_never_hold_the_model_are_refused_with_what_would_do(
    gpus: int, session: Json
) -> None:
    offered = with_sampler(an_open_base_model(LARGE), {**ENGINES, "gpusPerReplica": gpus})

    found = resolve(a_session(**session), offered, 0)

    assert isinstance(found, Rejection)
    assert found.reason is Reason.NEVER_FITS
    assert found.message.startswith(
        f"the BaseModel's sampler.gpusPerReplica: {gpus}, but an engine"
    )
    assert "of each H100-80 (weights " in found.message
    assert found.message.endswith("which has 79.0 GiB; use 4")
    assert len(found.message) <= MAX_MESSAGE_LENGTH
    enough = with_sampler(an_open_base_model(LARGE), {**ENGINES, "gpusPerReplica": 4})
    assert isinstance(resolve(a_session(**session), enough, 0), ResolvedSpec)


def test_engines_that_could_not_divide_the_model_are_refused_with_what_would_do() -> None:
    found = refusal(with_sampler(an_open_base_model(SMALL), {**ENGINES, "gpusPerReplica": 3}))

    assert found.reason is Reason.NEVER_FITS
    assert found.message == (
        "the BaseModel's sampler.gpusPerReplica: 3, but an engine cannot divide this model (qwen3)"
        " over so many GPUs; use 1"
    )


def test_engines_that_no_number_of_gpus_is_enough_for_are_refused_with_what_else_there_is() -> None:
    found = refusal(with_sampler(an_open_base_model(SMALL, "4GiB", 16), ENGINES))

    assert found.reason is Reason.NEVER_FITS
    assert found.message.endswith(
        "no number up to 16 is sufficient: use larger GPUs, shorter sequences or a smaller"
        " limits.maxLoraRank"
    )


def test_slots_for_adapters_of_named_modules_are_not_held_against_an_engine() -> None:
    """An L4 holds the model, and no three slots at rank 256 for all modules."""
    offered = an_open_base_model(SMALL, "L4", 8)
    named = {"loraTargetModules": ["q_proj", "v_proj"]}

    of_all = refusal(with_sampler(offered, {**ENGINES, "gpusPerReplica": 1}))
    of_some = with_sampler(offered, {**ENGINES, "gpusPerReplica": 1, "engines": named})

    assert of_all.message.endswith("which has 22.0 GiB; use 2")
    assert chosen(of_some).plan


def test_where_nothing_can_be_planned_samplers_are_not_refused_for_it() -> None:
    offered = an_open_base_model(planning={"gpu": "H100", "config": "{}"})

    assert chosen(offered, role="Sampler", lora=None).samplers == 1


def test_a_model_that_fits_no_way_is_refused_with_what_it_would_need() -> None:
    seen = reconcile(observed(base_model=an_open_base_model(LARGE, "L4", 1)), Settings()).status

    assert refusal(an_open_base_model(LARGE, "L4", 1)).reason is Reason.NEVER_FITS
    assert seen is not None
    stalled = find(seen.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert stalled.status == "True"
    assert "does not fit on 4xL4-24: each GPU has 22.0 GiB and would need" in stalled.message


@pytest.mark.parametrize("gpu", ["L4", "H1000"], ids=["fits no way", "not known"])
def test_what_was_found_out_once_is_remembered_by_what_it_depends_on(gpu: str) -> None:
    first = refusal(an_open_base_model(LARGE, gpu, 1))
    again = refusal(an_open_base_model(LARGE, gpu, 1))
    another = refusal(an_open_base_model(LARGE, gpu, 1, maxBatchTokens=64))

    assert again is first
    assert another is not first


@pytest.mark.parametrize(
    ("planning", "message"),
    [
        ({"gpu": "H1000", "config": "{}"}, "GPU 'H1000' is unknown; accepted: L4-24"),
        (
            {"gpu": "H100", "config": "{}"},
            "model_type: None is not supported by the planner; accepted",
        ),
        ({"gpu": "H100", "config": "[]"}, "expected the JSON object of a config.json"),
        ({"gpu": "H100", "config": "model"}, "Expecting value"),
        ({"gpu": "H100", "config": '{"model_type": "qwen3"}'}, "hidden_size"),
    ],
    ids=["GPU", "no model", "no object", "no JSON", "incomplete"],
)
def test_what_can_not_be_planned_from_is_refused_by_name(
    planning: dict[str, str], message: str
) -> None:
    found = refusal(an_open_base_model(planning=planning))

    assert found.reason is Reason.NOT_ALLOWED
    assert "the BaseModel's trainer.planning: " in found.message
    assert message in found.message


def test_a_model_that_the_megatron_trainer_refuses_is_refused_with_what_to_do() -> None:
    found = refusal(an_open_base_model("mistralai/Mistral-7B-v0.1"))

    assert found.reason is Reason.NOT_ALLOWED
    assert "config: the megatron trainer does not support attention in windows" in found.message
    assert "set trainer.backend to torch and omit trainer.planning" in found.message


def test_sequences_longer_than_the_model_takes_are_refused_by_name() -> None:
    takes = MODELS[LARGE]["config"]["max_position_embeddings"]
    offered = an_open_base_model()

    assert chosen(offered.model_copy(update={"max_context_length": takes})).plan
    found = refusal(offered.model_copy(update={"max_context_length": takes + 1}))
    assert found.reason is Reason.NOT_ALLOWED
    wanted = f"maxContextLength is {takes + 1}, but the model supports at most {takes} tokens"
    assert wanted in found.message
