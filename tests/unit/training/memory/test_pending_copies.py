"""A state that is exported while its model trains on is that of the moment of the export."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import assert_equal, held_models, moments_of, run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.tensor_file import Growing
from tinkercloud_worker.engine.trainer import OptimizerStep, TrainingState
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.paging import DiskFiles
from tinkercloud_worker.training.trained_model import PendingCopy

ADAM = AdamParams(learning_rate=1e-2)
BASE = TorchBaseModel(tiny_llama())


def a_trainer() -> TorchTrainer:
    trainer = TorchTrainer(BASE, max_batch_tokens=64)
    for name, rank in (("m", 4), ("other", 2)):
        trainer.add_model(name, LoraConfig(rank=rank, seed=1))
    return trainer


def assert_same(ours: TrainingState, theirs: TrainingState) -> None:
    assert ours.step == theirs.step
    assert_equal(ours.weights.tensors, theirs.weights.tensors, atol=0)
    assert_equal(moments_of(ours), moments_of(theirs), atol=0)


def train(trainer: TorchTrainer, seed: int) -> None:
    run(trainer, random_data([5], seed=seed))
    trainer.optim_step("m", ADAM)


def step_with_another(trainer: TorchTrainer, seed: int) -> None:
    for name in ("m", "other"):
        run(trainer, random_data([5], seed=seed), model_id=name)
    steps = [OptimizerStep("m", ADAM), OptimizerStep("other", ADAM)]
    trainer.stepper.run_batch(steps, lambda: None)


def load(trainer: TorchTrainer, seed: int) -> None:
    source = a_trainer()
    train(source, seed)
    trainer.import_state("m", source.export_state("m"))


def load_whole(trainer: TorchTrainer, seed: int) -> None:
    source = a_whole_model()
    train(source, seed)
    trainer.import_state("m", source.export_state("m"))


CHANGES = (train, step_with_another, load)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([*CHANGES, "export", "take"]), max_size=8))
def test_whatever_follows_an_export_does_not_change_it(
    events: list[Callable[[TorchTrainer, int], None] | str],
) -> None:
    trainer, expected, exported = a_trainer(), [], []
    for seed, event in enumerate([train, "export", *events, "export", train]):
        if event == "export":
            expected.append(trainer.export_state("m"))
            exported.append(trainer.begin_export("m"))
        elif event == "take" and exported:
            assert_same(exported.pop()(), expected.pop())
        elif callable(event):
            event(trainer, seed)

    for take, state in zip(exported, expected, strict=True):
        assert_same(take(), state)


def test_a_model_that_is_paged_out_after_an_export_is_saved_as_it_was(
    tmp_path: Path,
) -> None:
    room = [1 << 40]
    trainer = TorchTrainer(
        BASE,
        max_batch_tokens=64,
        memory=ModelMemory(lambda: room[0], DiskFiles(tmp_path, 1 << 30)),
    )
    trainer.add_model("m", LoraConfig(rank=4, seed=1))
    train(trainer, 1)
    expected, take = trainer.export_state("m"), trainer.begin_export("m")

    room[0] = 0
    held_models(trainer).make_room(1)

    assert trainer.memory_bytes("m") == 0
    assert_same(take(), expected)


def test_an_export_that_nobody_needs_any_more_is_not_made() -> None:
    trainer = a_trainer()
    train(trainer, 1)
    made = []
    copy = held_models(trainer)["m"].copy_later(lambda: made.append(1))
    del copy

    train(trainer, 2)

    assert not made


def test_a_step_waits_for_a_copy_that_another_thread_makes() -> None:
    trainer = a_trainer()
    train(trainer, 1)
    started, may_end, order = Event(), Event(), list[str]()

    def make() -> str:
        started.set()
        may_end.wait()
        order.append("copied")
        return "copy"

    def step() -> None:
        trainer.optim_step("m", ADAM)
        order.append("stepped")

    copy = held_models(trainer)["m"].copy_later(make)
    with ThreadPoolExecutor(2) as threads:
        taking = threads.submit(copy.take)
        started.wait()
        stepping = threads.submit(step)
        may_end.set()
        stepping.result()

    assert taking.result() == "copy"
    assert order == ["copied", "stepped"]


def test_a_copy_that_fails_fails_for_who_takes_it_and_for_no_step() -> None:
    trainer = a_trainer()

    def fail() -> object:
        raise MemoryError("no memory for a copy")

    copy: PendingCopy[object] = held_models(trainer)["m"].copy_later(fail)
    train(trainer, 1)

    assert trainer.export_state("m").step == 1
    with pytest.raises(MemoryError, match="no memory"):
        copy.take()


def a_whole_model() -> TorchTrainer:
    trainer = TorchTrainer(BASE, max_batch_tokens=64)
    trainer.add_model("m", None)
    train(trainer, 1)
    return trainer


def encoded(state: TrainingState) -> formats.Files:
    """Return the files of a state, with no copy of it."""
    files: formats.Files = {}

    def put(name: str, content: Callable[[Growing], object]) -> None:
        content(file := io.BytesIO())
        files[name] = file.getvalue()

    formats.write_whole_state(state, put)
    return files


@pytest.mark.parametrize("change", [train, load_whole], ids=["a step", "a load"])
def test_what_is_read_without_a_copy_is_the_state_before_the_next_change(
    change: Callable[[TorchTrainer, int], None],
) -> None:
    trainer = a_whole_model()
    expected = formats.encode_state(trainer.export_state("m"), "base")
    take = trainer.begin_reading("m", encoded)
    run(trainer, random_data([5], seed=2))

    change(trainer, 2)

    assert take() == expected
    assert formats.encode_state(trainer.export_state("m"), "base") != expected


def test_reading_a_whole_model_takes_no_second_copy_and_leaves_memory_that_can_be_freed() -> None:
    trainer = a_whole_model()
    vectors = held_models(trainer)["m"].vectors

    def addresses(state: TrainingState) -> set[int]:
        encoded(state)
        read = [*state.weights.tensors.values(), *moments_of(state).values()]
        return {each.untyped_storage().data_ptr() for each in read}

    assert trainer.begin_reading("m", addresses)() == {
        vector.untyped_storage().data_ptr() for vector in vectors if vector is not vectors[1]
    }
    assert all(vector.untyped_storage().resizable() for vector in vectors)
