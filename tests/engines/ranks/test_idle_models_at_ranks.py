"""Idle adapters leave the memory of all ranks if others need it, and return with the same bits."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_testing.ranks.crowded_ranks import Crowded, crowded_megatron, crowded_replica
from tinkercloud_testing.ranks.ranks import TrainerOf
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.training.trainers import (
    assert_equal,
    gradient_of,
    held_models,
    moments_of,
    run,
)
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import GradientLost, OptimizerStep, TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)
NAMES = ("first", "second", "third", "fourth")
LARGE = 1 << 40
Factory = Callable[[int, int], Crowded]
"""Builds a rank with so many bytes for models in memory, and in files."""


@pytest.fixture(scope="module", params=["replicas", "tensor parallel"])
def factory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Factory:
    files = tmp_path_factory.mktemp("files")
    if request.param == "replicas":
        return partial(crowded_replica, files)
    path = save(tiny_llama(), tmp_path_factory.mktemp("model"))
    return partial(crowded_megatron, str(path), files)


@pytest.fixture(scope="module")
def started(factory: Factory, trainer_of: TrainerOf) -> RankedTrainer:
    return trainer_of(2, partial(factory, LARGE, LARGE))


@pytest.fixture
def ranked(started: RankedTrainer) -> Iterator[RankedTrainer]:
    yield started
    resize(started, LARGE, LARGE)
    started.group.current.call("break_files", False)
    for name in tuple(started.group.held.names):
        started.remove_model(name)


def resize(ranked: RankedTrainer, *sizes: int) -> None:
    """Give each rank so many bytes for models."""
    ranked.group.current.call_each("resize", [(size,) for size in sizes])


def size_of(ranked: RankedTrainer) -> int:
    """Return the bytes that an adapter takes at each rank."""
    return 16 * int(ranked.group.current.call("adapter_size", LORA))


def room_for(ranked: RankedTrainer, models: float) -> None:
    """Give each rank memory for a number of adapters; a new one counts for a quarter more."""
    size = int(models * size_of(ranked))
    resize(ranked, size, size)


def add(ranked: RankedTrainer, *names: str) -> None:
    for name in names:
        ranked.add_model(name, LORA)


def step(ranked: RankedTrainer, name: str, seed: int) -> tuple[object, object]:
    output = run(ranked, random_data([5, 9, 4], seed=seed), model_id=name)
    return output.metrics, ranked.optim_step(name, ADAM)


def steps_in_turn(ranked: RankedTrainer) -> list[tuple[object, object]]:
    return [step(ranked, name, seed) for seed in range(3) for name in NAMES]


def out_at_ranks(ranked: RankedTrainer) -> list[set[str]]:
    """Return the models that are paged out at each rank."""
    reports = ranked.group.current.call_each("memory", [()] * 2)
    return [{n for n, each in report.models.items() if each.kept is not None} for report in reports]


def assert_same(ranked: RankedTrainer, one: str, other: str) -> None:
    ours, theirs = ranked.export_state(one), ranked.export_state(other)
    assert ours.step == theirs.step
    assert_equal(ours.weights.tensors, theirs.weights.tensors, atol=0)
    assert_equal(moments_of(ours), moments_of(theirs), atol=0)


def test_adapters_that_take_turns_in_the_memory_of_two_train_as_with_memory_for_all(
    ranked: RankedTrainer,
) -> None:
    add(ranked, *NAMES)
    expected = steps_in_turn(ranked)
    for name in NAMES:
        ranked.remove_model(name)
    room_for(ranked, 2.5)

    add(ranked, *NAMES)
    for name in NAMES:
        ranked.export_state(name)
    got = steps_in_turn(ranked)

    assert got == expected
    held = [ranked.memory_bytes(name) for name in NAMES]
    assert held.count(size_of(ranked)) == 2
    assert held.count(0) == 2
    assert max(ranked.group.current.call_each("used", [()] * 2)) <= 2.5 * size_of(ranked)
    capacity = ranked.capacity
    assert capacity is not None
    assert (capacity.models, capacity.model_bytes) == (2, size_of(ranked))


def test_an_idle_adapter_is_saved_where_it_is_and_returns_with_its_unapplied_gradient(
    ranked: RankedTrainer,
) -> None:
    add(ranked, "here", "away")
    for name in ("here", "away"):
        step(ranked, name, 0)
        run(ranked, random_data([7, 6], seed=1), model_id=name)
    run(ranked, random_data([7], seed=2), model_id="here")
    ranked.discard_gradient("here")
    run(ranked, random_data([7, 6], seed=1), model_id="here")
    room_for(ranked, 2.5)

    add(ranked, "new")

    assert out_at_ranks(ranked) == [{"away"}] * 2
    assert ranked.memory_bytes("away") == 0
    assert_same(ranked, "away", "here")
    assert_equal(ranked.copy_weights("away").tensors, ranked.copy_weights("here").tensors, atol=0)
    assert_equal(gradient_of(ranked, "away"), gradient_of(ranked, "here"), atol=0)
    assert out_at_ranks(ranked) == [{"away"}] * 2
    assert ranked.optim_step("away", ADAM) == ranked.optim_step("here", ADAM)
    assert_same(ranked, "away", "here")


def test_the_gradient_of_an_adapter_that_is_away_is_discarded_there(
    ranked: RankedTrainer,
) -> None:
    add(ranked, "here", "away")
    run(ranked, random_data([7, 6], seed=1), model_id="away")
    step(ranked, "here", 0)
    room_for(ranked, 2.5)
    add(ranked, "new")

    ranked.discard_gradient("away")

    assert out_at_ranks(ranked) == [{"away"}] * 2
    assert step(ranked, "away", 0) == step(ranked, "new", 0)


def test_a_state_is_loaded_into_an_adapter_that_is_away(ranked: RankedTrainer) -> None:
    add(ranked, "here", "away")
    step(ranked, "away", 1)
    step(ranked, "here", 0)
    run(ranked, random_data([7, 6], seed=1), model_id="here")
    room_for(ranked, 2.5)
    add(ranked, "new")
    assert out_at_ranks(ranked) == [{"away"}] * 2

    ranked.import_state("away", ranked.export_state("here"))
    ranked.import_gradient("away", gradient_of(ranked, "here"))

    assert ranked.optim_step("away", ADAM) == ranked.optim_step("here", ADAM)
    assert_same(ranked, "away", "here")


def test_as_many_adapters_are_admitted_as_the_capacity_says_and_the_next_gets_the_numbers(
    factory: Factory, ranked: RankedTrainer
) -> None:
    size = size_of(ranked)
    ranked.group.current.call("become", partial(factory, 5 * size // 2, 6 * size))
    names = [f"m-{number}" for number in range(20)]
    for name in names[:3]:
        add(ranked, name)
        step(ranked, name, 0)
    capacity = ranked.capacity
    assert capacity is not None
    assert capacity.more_models is not None

    def fill() -> None:
        for name in names[3:]:
            add(ranked, name)
            step(ranked, name, 0)

    with pytest.raises(Overloaded, match=r"are missing where idle models are kept") as refused:
        fill()

    assert len(ranked.group.held.names) == 3 + capacity.more_models > 3
    assert f"{size // 16} parameters at rank 0 of the trainer" in refused.value.message
    for name in list(ranked.group.held.names):
        step(ranked, name, 1)
    for name in list(ranked.group.held.names):
        ranked.remove_model(name)
    ranked.group.current.call("become", partial(factory, LARGE, LARGE))


def test_the_rank_with_the_least_room_decides(ranked: RankedTrainer) -> None:
    size = size_of(ranked)
    resize(ranked, 10 * size, 5 * size // 2)
    add(ranked, "first", "second")
    for name in ("first", "second"):
        step(ranked, name, 0)
    ranked.remove_model("unknown")

    add(ranked, "third")

    assert out_at_ranks(ranked) == [{"first"}] * 2
    assert ranked.capacity is not None
    assert ranked.capacity.free_bytes < size


def test_an_adapter_that_one_rank_cannot_page_out_stays_at_all(ranked: RankedTrainer) -> None:
    room_for(ranked, 2.5)
    add(ranked, "first", "second", "third")
    assert out_at_ranks(ranked) == [{"first"}] * 2
    ranked.group.current.call_each("break_files", [(False,), (True,)])

    with pytest.raises(Overloaded, match="model first was unloaded while idle"):
        step(ranked, "first", 0)
    with pytest.raises(Overloaded, match="are reserved for the 2 models loaded here"):
        add(ranked, "fourth")

    assert out_at_ranks(ranked) == [{"first"}] * 2
    expected = [step(ranked, name, 0) for name in ("second", "third")]
    assert expected[0] == expected[1]
    ranked.group.current.call("break_files", False)
    assert step(ranked, "first", 0) == expected[0]


def items(ranked: RankedTrainer, names: Sequence[str]) -> list[TrainingPass]:
    batch = prepare(a_request(random_data([5, 4])), ranked.limits)
    return [TrainingPass(name, batch) for name in names]


def test_adapters_that_share_a_pass_or_a_step_are_all_there_or_none_is_changed(
    ranked: RankedTrainer,
) -> None:
    room_for(ranked, 2.5)
    add(ranked, *NAMES[:3])
    away, second, third = items(ranked, NAMES[:3])
    assert not ranked.batcher.can_batch([second], away)

    with pytest.raises(Overloaded, match="was unloaded while idle"):
        ranked.batcher.run_batch([away, second, third], lambda: None)
    with pytest.raises(Overloaded, match="was unloaded while idle"):
        ranked.stepper.run_batch([OptimizerStep(name, ADAM) for name in NAMES[:3]], lambda: None)

    assert out_at_ranks(ranked)[0] == out_at_ranks(ranked)[1] != set()
    results = [step(ranked, name, 0) for name in NAMES[:3]]
    assert results[0] == results[1] == results[2]


@pytest.fixture(scope="module")
def mortal(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedTrainer]:
    """A trainer with memory for two adapters, and after a loss of ranks another group of them."""
    files = tmp_path_factory.mktemp("mortal")
    alone = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=1)
    alone.add_model("m", LORA)
    size = held_models(alone)["m"].trainable.flat.numel()
    small = partial(crowded_replica, files, 40 * size, LARGE)
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(2, cpus_per_rank=0.1), small))
    yield ranked
    ranked.close()


@pytest.mark.parametrize("method", ["forward_backward", "page_out", "page_in"])
def test_adapters_of_a_lost_group_continue_wherever_they_were(
    mortal: RankedTrainer, method: str
) -> None:
    add(mortal, *NAMES)
    first = [step(mortal, name, 0) for name in NAMES]
    mortal.group.current.call("die_in", method, 1)
    with pytest.raises(GradientLost, match=f"failed in {method}"):
        step(mortal, NAMES[0], 1)
    states = [mortal.export_state(name) for name in NAMES]
    got = [first, *([step(mortal, name, seed) for name in NAMES] for seed in (1, 2))]

    for name in NAMES:
        mortal.remove_model(name)
    add(mortal, "undisturbed")
    assert [state.step for state in states] == [1] * len(NAMES)
    assert got == [[step(mortal, "undisturbed", seed)] * len(NAMES) for seed in range(3)]
    mortal.remove_model("undisturbed")
