"""What is true of every plan, for public models on many kinds and numbers of GPUs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.pods.shapes import MAX_TOKENS
from tinkercloud_crds.structural import structural_schema
from tinkercloud_planning.activations import FUSED, SEPARATE, Kernels
from tinkercloud_planning.architecture import Architecture, UnknownArchitecture
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import MEMORY_GIB, Fleet, UnknownGpus, gpu, parse
from tinkercloud_planning.layouts import engine_sizes, layouts
from tinkercloud_planning.memory import kv_bytes_per_token, training
from tinkercloud_planning.plan import ModelPlan, plan
from tinkercloud_planning.refusal import DoesNotFit, fewest_gpus
from tinkercloud_planning.search import Demand, divide, micro_batch_tokens
from tinkercloud_testing.training.planned_adapters import adapter_parameters

pytestmark = pytest.mark.timeout(120)

CONFIGS: dict[str, dict[str, Any]] = {
    name: model["config"]
    for name, model in json.loads(
        (Path(__file__).parent / "public_models.json").read_text()
    ).items()
}
MODELS: dict[str, Architecture] = {name: read(config) for name, config in CONFIGS.items()}
UNEVEN = {"tensor": 3, "pipeline": 1, "context": 1, "expert": 1}
COUNTS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 64)
REST_OF_THE_SPEC = {
    "modelName": "acme/model",
    "source": {"hub": "acme/model"},
}

models = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)
kinds = st.sampled_from(sorted(MEMORY_GIB)).map(gpu)
fleets = st.builds(Fleet, kinds, st.sampled_from(COUNTS))
ranks = st.sampled_from([None, 1, 8, 32, 256])
lengths = st.sampled_from([16, 1000, 2048, 8192])
demands = st.builds(
    lambda model, length, rank: Demand(model, min(length, model.max_context_length), rank),
    models,
    lengths,
    ranks,
)
often = settings(max_examples=settings().max_examples // 4)


def a_plan(demand: Demand, fleet: Fleet) -> ModelPlan:
    """Return the plan for a demand; the example is rejected if there is none."""
    assume(divide(demand, fleet))
    return plan(
        demand.architecture,
        fleet,
        sequence_length=demand.sequence_length,
        lora_rank=demand.lora_rank,
    )


def rules_of(
    schema: dict[str, Any], *path: str
) -> Iterator[tuple[tuple[str, ...], celpy.Runner, str]]:
    """Yield place, program and message of each CEL rule about the creation of a resource."""
    environment = celpy.Environment()
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            program = environment.program(environment.compile(rule["rule"]))
            yield path, program, rule["message"]
    for name, child in schema.get("properties", {}).items():
        yield from rules_of(child, *path, name)


RULES = list(rules_of(structural_schema(BaseModelSpec)))


def broken_rules(spec: dict[str, Any]) -> list[str]:
    """Return the messages of the CEL rules that a BaseModel's spec breaks."""
    places = (
        (reduce(lambda part, name: part.get(name, {}), path, spec), program, message)
        for path, program, message in RULES
    )
    return [
        message
        for part, program, message in places
        if part and not program.evaluate({"self": json_to_cel(part)})
    ]


@often
@given(demands, fleets)
def test_trainer_and_sampler_use_all_gpus(demand: Demand, fleet: Fleet) -> None:
    division = a_plan(demand, fleet).division

    layout, sampler = division.trainer.layout, division.sampler
    trains = layout.tensor * layout.pipeline * layout.context * layout.data
    assert sampler
    samples = sampler.engines * sampler.tensor
    together = (fleet.count, fleet.count) if division.colocated else (trains, fleet.count - trains)
    assert (trains, samples) == together


@often
@given(demands, fleets)
def test_whatever_is_divided_is_divided_evenly(demand: Demand, fleet: Fleet) -> None:
    made = a_plan(demand, fleet)

    model, layout = demand.architecture, made.division.trainer.layout
    assert model.heads % layout.tensor == 0
    assert model.computed.heads % layout.tensor == 0
    assert model.layers % layout.pipeline == 0
    assert max(model.experts, 1) % layout.expert == 0
    assert layout.context * layout.data % layout.expert == 0
    assert made.trainer.backend == "megatron" or layout.data == layout.gpus
    assert made.division.sampler
    assert model.heads % made.division.sampler.tensor == 0
    assert made.trainer.gpus_per_replica % layout.tensor == 0
    assert made.trainer.gpus_per_replica <= fleet.per_node
    assert made.sampler.gpus_per_replica <= fleet.per_node


@often
@given(models, fleets)
def test_every_layout_that_is_considered_divides_evenly(model: Architecture, fleet: Fleet) -> None:
    considered = list(layouts(model, fleet.count, min(fleet.count, fleet.per_node)))

    assert considered
    assert all(layout.gpus == fleet.count for layout in considered)
    assert {model.computed.heads % layout.tensor for layout in considered} == {0}
    assert {model.heads % layout.tensor for layout in considered} == {0}
    assert {model.layers % layout.pipeline for layout in considered} == {0}
    assert {max(model.experts, 1) % layout.expert for layout in considered} == {0}
    assert {layout.context * layout.data % layout.expert for layout in considered} == {0}


@often
@given(demands, fleets)
def test_no_gpu_holds_more_than_it_has(demand: Demand, fleet: Fleet) -> None:
    division = a_plan(demand, fleet).division

    assert division.sampler
    assert division.trainer.memory.total <= fleet.gpu.memory
    assert division.sampler.memory.total <= fleet.gpu.memory
    assert division.trainer.tokens >= demand.sequence_length
    assert division.sampler.sequences >= 1


@often
@given(demands, fleets)
def test_a_base_model_accepts_what_was_planned(demand: Demand, fleet: Fleet) -> None:
    made = a_plan(demand, fleet)

    spec = {**REST_OF_THE_SPEC, **json.loads(json.dumps(made.spec()))}
    spec["head"]["image"] = "worker:1"

    accepted = BaseModelSpec.model_validate(spec)
    assert accepted.trainer == made.trainer
    assert accepted.sampler == made.sampler
    assert accepted.head.resources == made.head
    assert broken_rules(spec) == []


@often
@given(demands, fleets)
def test_host_memory_holds_what_is_trained_as_it_passes_through(
    demand: Demand, fleet: Fleet
) -> None:
    made, architecture = a_plan(demand, fleet), demand.architecture
    rank = demand.lora_rank
    tower = architecture.tower.parameters if architecture.tower else 0
    whole = architecture.parameters - tower
    numbers = whole if rank is None else adapter_parameters(architecture, rank)

    # Values and two moments, in float32.
    state = 12 * numbers
    # A head reads or writes what its store holds; ranks take their part from there to their GPUs.
    assert gib(made.head.memory) >= 2 * state
    for resources in (made.trainer.resources, made.head):
        assert 0.8 * gib(resources.shared_memory) >= state
        assert gib(resources.memory) >= gib(resources.shared_memory)


def gib(quantity: str) -> int:
    """Return a quantity of whole GiB in bytes."""
    return int(quantity.removesuffix("Gi")) << 30


@settings(often, suppress_health_check=[HealthCheck.filter_too_much])
@given(demands, st.builds(Fleet, kinds, st.sampled_from((1, 2))))
def test_a_shared_gpu_has_room_for_both_whichever_starts_first(
    demand: Demand, fleet: Fleet
) -> None:
    made = a_plan(demand, fleet)
    assert made.division.sampler
    engines, memory = made.sampler.engines, made.division.sampler.memory
    assume(made.division.colocated and engines is not None)
    assert engines is not None
    assert engines.gpu_memory_percent is not None
    assert engines.max_cached_tokens is not None

    # What SGLang takes for weights and cache: a part of what is free, and no more tokens than that.
    loaded = fleet.gpu.memory - fleet.gpu.contexts(1) - memory.neighbour
    weights = memory.weights + memory.trained
    per_token = kv_bytes_per_token(demand.architecture, made.sampler.gpus_per_replica)
    after = engines.gpu_memory_percent / 100 * loaded - weights
    assert after + 1 >= memory.kv_cache
    first = weights + engines.max_cached_tokens * per_token
    rest = memory.activations + memory.logits + fleet.gpu.contexts(2)
    assert first + memory.neighbour + rest <= fleet.gpu.memory
    # What either keeps while the other computes.
    trainer = made.division.trainer.memory
    assert trainer.neighbour == memory.trained > 0
    assert memory.neighbour == trainer.weights + trainer.trained


@often
@given(demands, fleets)
def test_every_choice_has_a_reason(demand: Demand, fleet: Fleet) -> None:
    reasons = {reason.choice: reason for reason in a_plan(demand, fleet).reasons}

    assert {"GPUs", "tensor", "pipeline", "context", "data"} <= reasons.keys()
    # Engines over nodes are servers that the user starts.
    assert len({"sampler", "servers"} & reasons.keys()) == 1
    assert all(reason.why for reason in reasons.values())


@often
@given(demands)
def test_more_memory_never_needs_more_gpus(demand: Demand) -> None:
    by_memory = sorted((gpu(name) for name in MEMORY_GIB), key=lambda kind: kind.memory)

    needed = [fewest_gpus(demand, Fleet(kind, 1)) or 1 << 20 for kind in by_memory]

    assert needed == sorted(needed, reverse=True)


@often
@given(demands, fleets, st.integers(0, 1 << 37))
def test_what_fits_some_gpus_fits_as_many_with_more_memory(
    demand: Demand, fleet: Fleet, added: int
) -> None:
    assume(divide(demand, fleet))

    larger = replace(fleet, gpu=replace(fleet.gpu, memory=fleet.gpu.memory + added))

    assert divide(demand, larger)


@often
@given(demands, fleets, st.integers(16, 200_000), st.integers(16, 200_000), st.data())
def test_a_longer_sequence_never_gets_larger_micro_batches_from_the_same_layout(
    demand: Demand, fleet: Fleet, one: int, other: int, data: st.DataObject
) -> None:
    possible = list(layouts(demand.architecture, fleet.count, min(fleet.count, fleet.per_node)))
    layout = data.draw(st.sampled_from(possible))

    shorter, longer = (
        micro_batch_tokens(replace(demand, sequence_length=length), layout, fleet.gpu.memory) or 0
        for length in sorted((one, other))
    )

    assert longer <= shorter


@often
@given(models, st.integers(16, 1 << 17), st.integers(1, 48))
def test_a_micro_batch_takes_the_longest_sequence_as_long_as_ranks_that_divide_it_make_it(
    model: Architecture, longest: int, gpus: int
) -> None:
    demand = Demand(replace(model, max_context_length=longest), longest, 8)

    for layout in layouts(demand.architecture, gpus, 8):
        tokens = micro_batch_tokens(demand, layout, 1 << 60)
        assert tokens is not None
        divided = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
        assert tokens >= longest + -longest % divided


@often
@given(models, st.integers(16, MAX_TOKENS))
def test_gpus_that_are_large_enough_take_the_longest_sequence_of_any_model(
    model: Architecture, longest: int
) -> None:
    model = replace(model, max_context_length=longest)

    planned = plan(model, parse("8x9999GiB"), sequence_length=longest, lora_rank=32)

    assert longest <= planned.trainer.max_batch_tokens <= MAX_TOKENS


@pytest.mark.parametrize(
    ("longest", "tokens"), [(4096, 65536), (200_000, 200_192), (MAX_TOKENS, MAX_TOKENS)]
)
def test_micro_batches_are_no_larger_than_is_of_use(longest: int, tokens: int) -> None:
    model = replace(MODELS["Qwen/Qwen2.5-0.5B"], max_context_length=longest)

    planned = plan(model, parse("8x9999GiB"), sequence_length=4096, lora_rank=32)

    (reason,) = [reason for reason in planned.reasons if reason.choice == "maxBatchTokens"]
    assert (reason.value, reason.why) == (str(tokens), "more would not be faster")


@often
@given(demands, fleets)
def test_what_fits_a_sequence_fits_a_shorter_one(demand: Demand, fleet: Fleet) -> None:
    assume(divide(demand, fleet))

    assert divide(replace(demand, sequence_length=demand.sequence_length // 2), fleet)


@often
@given(models, st.sampled_from([1, 8, 64, 256]))
def test_lora_of_an_undivided_model_never_needs_more_memory_than_a_full_fine_tune(
    model: Architecture, rank: int
) -> None:
    (layout,) = layouts(model, 1, 1)

    lora, full = (
        training(model, layout, tokens=4096, lora_rank=trained, kernels=SEPARATE)
        for trained in (rank, None)
    )

    assert lora.total <= full.total


@pytest.mark.parametrize(
    ("name", "backend", "kernels"),
    [
        ("mistralai/Mistral-7B-v0.1", "torch", FUSED),
        ("mistralai/Mistral-7B-v0.3", "megatron", SEPARATE),
    ],
)
def test_micro_batches_are_what_fits_with_the_kernels_of_the_trainer_that_is_named(
    name: str, backend: str, kernels: Kernels
) -> None:
    planned = plan(MODELS[name], parse("2xA100-40"), sequence_length=4096, lora_rank=32)

    trainer, kind = planned.division.trainer, planned.fleet.gpu
    fits, too_many = (
        training(
            MODELS[name],
            trainer.layout,
            tokens=tokens,
            lora_rank=32,
            kernels=kernels,
            reserve=kind.contexts(1),
        )
        for tokens in (trainer.tokens, trainer.tokens + 256)
    )
    assert planned.trainer.backend == backend
    assert trainer.memory == fits
    assert fits.total <= kind.memory < too_many.total


@settings(often, suppress_health_check=[HealthCheck.filter_too_much])
@given(demands, st.builds(Fleet, kinds, st.sampled_from((1, 2, 3))))
def test_a_refusal_names_gpus_that_are_enough(demand: Demand, fleet: Fleet) -> None:
    model, length, rank = demand.architecture, demand.sequence_length, demand.lora_rank
    assume(not divide(demand, fleet))

    with pytest.raises(DoesNotFit, match="does not fit on") as refused:
        plan(model, fleet, sequence_length=length, lora_rank=rank)

    remedy = re.search(r"What would fit: (\d+x[\w-]+)", str(refused.value))
    assume(remedy)
    assert remedy is not None
    plan(model, parse(remedy[1]), sequence_length=length, lora_rank=rank)


@settings(often, suppress_health_check=[HealthCheck.filter_too_much])
@given(demands, st.builds(Fleet, kinds, st.sampled_from((1, 2, 3)), st.sampled_from((4, 8))))
@pytest.mark.long
def test_a_refusal_names_the_fewest_gpus_of_all_choices_and_of_the_given_kind(
    demand: Demand, fleet: Fleet
) -> None:
    model, length, rank = demand.architecture, demand.sequence_length, demand.lora_rank
    assume(not divide(demand, fleet))
    kinds = {kind.name: kind for kind in (fleet.gpu, *map(gpu, MEMORY_GIB))}.values()
    counts = {*range(1, fleet.per_node), *range(fleet.per_node, 8 * fleet.per_node + 1)}
    usable = [n for n in counts if n <= fleet.per_node or not n % fleet.per_node]
    choices = [Fleet(kind, count, fleet.per_node) for kind in kinds for count in usable]
    fitting = [each for each in choices if divide(demand, each)]

    with pytest.raises(DoesNotFit, match="does not fit on") as refused:
        plan(model, fleet, sequence_length=length, lora_rank=rank)

    would = str(refused.value).partition("What would fit: ")[2]
    named = re.findall(r"\b(\d+)x([\w-]+)", would)
    fewest = min(((each.count, each.gpu.memory) for each in fitting), default=None)
    own = min((each.count for each in fitting if each.gpu == fleet.gpu), default=None)
    sizes = [(int(count), gpu(kind).memory) for count, kind in named]
    assert sizes[:1] == ([fewest] if fewest is not None else [])
    assert own is None or (str(own), fleet.gpu.name) in named
    assert len(named) <= 2


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("trainer", "replicas", 0, "replicas: if 0"),
        ("trainer", "parallelism", UNEVEN, "must divide"),
        ("sampler", "replicas", 0, "for sglang, set either replicas to 1 or more"),
    ],
)
def test_the_rules_that_plans_are_checked_against_can_be_broken(
    part: str, field: str, value: object, message: str
) -> None:
    model = MODELS["Qwen/Qwen3-8B"]
    spec = plan(model, parse("8xH100"), sequence_length=4096, lora_rank=8).spec()

    broken = broken_rules({**spec, part: {**spec[part], field: value}})

    assert message in " ".join(broken)


def test_engines_cut_no_block_of_quantized_weights() -> None:
    config = CONFIGS["Qwen/Qwen3-30B-A3B"]
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    stored = read({**config, "quantization_config": blocks})

    # Experts are 768 wide: six blocks.
    assert config["moe_intermediate_size"] == 768
    assert engine_sizes(read(config), 8) == [1, 2, 4, 8]
    assert engine_sizes(stored, 8) == [1, 2]


@pytest.mark.parametrize("sides", [[128], "128", [0, 128], [128.0, 128]], ids=str)
def test_blocks_that_are_none_are_refused(sides: object) -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": sides}

    with pytest.raises(UnknownArchitecture, match=r"two positive integers"):
        read({**CONFIGS["Qwen/Qwen3-8B"], "quantization_config": blocks})


def test_a_plan_for_mixtral_says_that_engines_take_no_adapters_of_its_experts() -> None:
    model = MODELS["mistralai/Mixtral-8x7B-v0.1"]

    adapted = plan(model, parse("16xH100"), sequence_length=4096, lora_rank=8)
    whole = plan(model, parse("64xH100"), sequence_length=4096, lora_rank=None)

    assert "with train_mlp=False" in [reason.value for reason in adapted.reasons]
    assert "with train_mlp=False" not in [reason.value for reason in whole.reasons]


@pytest.mark.parametrize(
    ("text", "name", "count", "gib"),
    [
        ("8xH100", "H100-80", 8, 79),
        ("1xa100-40", "A100-40", 1, 39),
        ("16xB200", "B200-192", 16, 178),
        ("2x48GiB", "48GiB", 2, 48),
    ],
)
def test_gpus_are_written_as_people_write_them(text: str, name: str, count: int, gib: int) -> None:
    fleet = parse(text)

    assert (fleet.gpu.name, fleet.count, fleet.gpu.memory) == (name, count, gib << 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100", "expected a positive number, x and a type"),
        ("8xA100", "accepted: .*A100-40, A100-80"),
        ("0xH100", "expected a positive number"),
        ("2x8xH100", "as 16xH100"),
        ("12xH100", "multiple of 8"),
    ],
)
def test_gpus_that_are_none_are_refused_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(UnknownGpus, match=message):
        parse(text)
