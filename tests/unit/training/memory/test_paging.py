"""Idle models leave the memory of the trainer if others need it, and return with the same bits."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, Limits
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import (
    assert_equal,
    gradient_of,
    held_models,
    moments_of,
    run,
)
from tinkercloud_worker.build_trainer import build_trainer
from tinkercloud_worker.device.memory import part_of
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.engine.trainer import OptimizerStep, TrainingPass
from tinkercloud_worker.lora.parameters import TensorLayout, TensorSpec, Trainable
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import (
    TorchTrainer,
    TorchTrainerWithSampler,
)
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.paging import DiskFiles, HostMemory, Models, PagingPlace
from tinkercloud_worker.training.trained_model import TrainedModel

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)
NAMES = ("first", "second", "third", "fourth")


class Machine:
    """A trainer with memory for a number of adapters, and one on a machine without limits.

    A new adapter counts for a quarter more: its gradient may not have been allocated yet.
    """

    def __init__(
        self, room: float, place: PagingPlace | None, kind: type[TorchTrainer] = TorchTrainer
    ) -> None:
        self.unlimited = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=32)
        self.unlimited.add_model("m", LORA)
        size = held_models(self.unlimited)["m"].full_bytes
        self.size = int(room * size)
        self.trainer = kind(
            TorchBaseModel(tiny_llama()),
            max_batch_tokens=32,
            memory=ModelMemory(lambda: self.size + KEPT_FREE_BYTES - self.used(), place),
        )

    def used(self) -> int:
        # A trainer measures its memory before it is complete.
        if not hasattr(self, "trainer"):
            return 0
        return sum(map(self.trainer.memory_bytes, held_models(self.trainer)))

    def add(self, *names: str) -> None:
        for trainer in (self.trainer, self.unlimited):
            for name in names:
                trainer.add_model(name, LORA)

    def step(self, name: str, seed: int) -> tuple[object, object]:
        """Train a model on both machines; return the metrics of each."""
        a, b = (
            (
                run(trainer, random_data([5, 9], seed=seed), model_id=name).metrics,
                trainer.optim_step(name, ADAM),
            )
            for trainer in (self.trainer, self.unlimited)
        )
        return a, b


@pytest.fixture(params=["host memory", "files"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> PagingPlace:
    return (
        HostMemory(lambda: None) if request.param == "host memory" else DiskFiles(tmp_path, 1 << 30)
    )


def assert_same_models(machine: Machine) -> None:
    for name in NAMES:
        ours, theirs = (t.export_state(name) for t in (machine.trainer, machine.unlimited))
        assert ours.step == theirs.step
        assert_equal(ours.weights.tensors, theirs.weights.tensors, atol=0)
        assert_equal(moments_of(ours), moments_of(theirs), atol=0)


def test_more_models_than_fit_train_with_the_bits_of_models_that_stay(place: PagingPlace) -> None:
    machine = Machine(2.5, place)

    machine.add(*NAMES)
    for seed in range(3):
        for name in NAMES:
            ours, theirs = machine.step(name, seed)
            assert ours == theirs
            assert machine.used() <= machine.size

    assert_same_models(machine)


def test_a_changed_bit_of_a_model_on_the_disk_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[BinaryIO] = []
    make = tempfile.TemporaryFile

    def kept(dir: Path) -> BinaryIO:  # noqa: A002 - the name of the parameter
        files.append(make(dir=dir))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", kept)
    vector = torch.arange(1000, dtype=torch.float32)
    content = DiskFiles(tmp_path, 1 << 30).keep(vector)
    assert torch.equal(content(), vector)

    files[0].seek(2001)
    [byte] = files[0].read(1)
    files[0].seek(2001)
    files[0].write(bytes([byte ^ 4]))
    files[0].flush()

    with pytest.raises(OSError, match=r"kept on the disk .* is damaged"):
        content()


def test_an_idle_model_takes_no_memory_and_keeps_its_unapplied_gradient(place: PagingPlace) -> None:
    machine = Machine(1, place)
    machine.add("first")
    machine.step("first", seed=0)
    for trainer in (machine.trainer, machine.unlimited):
        run(trainer, random_data([7], seed=1), model_id="first")

    machine.add("second")

    assert machine.trainer.memory_bytes("first") == 0
    gradients = [gradient_of(trainer, "first") for trainer in (machine.trainer, machine.unlimited)]
    assert_equal(*gradients, atol=0)


@pytest.mark.parametrize("kind", [TorchTrainer, TorchTrainerWithSampler])
def test_a_model_that_is_away_is_saved_and_published_without_taking_memory(
    place: PagingPlace, kind: type[TorchTrainer]
) -> None:
    machine = Machine(1, place, kind)
    machine.add("first")
    machine.step("first", seed=0)
    for trainer in (machine.trainer, machine.unlimited):
        run(trainer, random_data([7], seed=1), model_id="first")
    machine.add("second")

    machine.size = 0

    ours, theirs = (t.export_state("first") for t in (machine.trainer, machine.unlimited))
    assert ours.step == theirs.step
    assert_equal(ours.weights.tensors, theirs.weights.tensors, atol=0)
    assert_equal(moments_of(ours), moments_of(theirs), atol=0)
    assert_equal(machine.trainer.copy_weights("first").tensors, theirs.weights.tensors, atol=0)
    assert_equal(machine.trainer.published("first").tensors, theirs.weights.tensors, atol=0)
    gradients = [gradient_of(trainer, "first") for trainer in (machine.trainer, machine.unlimited)]
    assert_equal(*gradients, atol=0)
    assert machine.trainer.memory_bytes("first") == 0
    assert machine.trainer.memory_bytes("second") > 0


def test_to_save_a_model_does_not_count_as_its_use(place: PagingPlace) -> None:
    machine = Machine(2.5, place)
    machine.add("first", "second")
    machine.trainer.export_state("first")

    machine.add("third")

    assert machine.trainer.memory_bytes("first") == 0


def test_the_model_that_was_used_least_recently_leaves_first(place: PagingPlace) -> None:
    machine = Machine(2.5, place)
    machine.add("first", "second")
    machine.step("first", seed=0)

    machine.add("third")

    assert machine.trainer.memory_bytes("second") == 0
    assert machine.trainer.memory_bytes("first") > 0


def test_models_that_share_a_pass_are_all_loaded_or_none_is_changed(place: PagingPlace) -> None:
    machine = Machine(2.5, place)
    machine.add(*NAMES[:3])
    trainer = machine.trainer
    batch = prepare(a_request(random_data([5])), trainer.limits)

    trainer.run_batch([TrainingPass(name, batch) for name in NAMES[:2]], lambda: None)
    with pytest.raises(Overloaded, match="was unloaded while idle"):
        trainer.run_batch([TrainingPass(name, batch) for name in NAMES[:3]], lambda: None)
    with pytest.raises(Overloaded, match="was unloaded while idle"):
        trainer.stepper.run_batch([OptimizerStep(name, ADAM) for name in NAMES[:3]], lambda: None)

    ours, theirs = machine.step("third", seed=0)
    assert ours == theirs


def test_a_model_that_leaves_between_two_pieces_of_its_request_returns(place: PagingPlace) -> None:
    machine = Machine(1, place)
    machine.add("first", "second")
    batch = prepare(a_request(random_data([30, 30, 30])), machine.trainer.limits)
    pieces = machine.trainer.pieces(TrainingPass("first", batch), lambda: None)

    while True:
        try:
            next(pieces)
        except StopIteration:
            break
        run(machine.trainer, random_data([4]), model_id="second")
        assert machine.trainer.memory_bytes("first") == 0
    machine.unlimited.forward_backward("first", batch)

    gradients = [gradient_of(trainer, "first") for trainer in (machine.trainer, machine.unlimited)]
    assert_equal(*gradients, atol=0)


def test_host_memory_needs_room_for_the_block_that_torch_pins_for_a_vector() -> None:
    available = [(1 << 30) + 4095]
    place = HostMemory(lambda: available[0])
    vector = torch.ones(600)  # 2400 bytes, in a block of 4096

    with pytest.raises(OSError, match="4096 bytes do not fit"):
        place.keep(vector)
    available[0] += 1

    assert torch.equal(place.keep(vector)(), vector)


def resident_bytes() -> int:
    """Return the memory that this process really takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_only_as_many_models_leave_the_memory_of_a_machine_as_others_need(tmp_path: Path) -> None:
    limit = [1 << 62]
    models = Models(DiskFiles(tmp_path, 1 << 30), lambda size: size + resident_bytes() - limit[0])
    # From now on the allocator keeps blocks of up to this size, as in a process that has trained.
    torch.ones(30 << 18)
    for number in range(8):
        layout = TensorLayout([TensorSpec("w", (1 << 20,))])
        model = models[str(number)] = TrainedModel(LORA, Trainable(layout))
        model.begin_moments()
        for vector in model.vectors:
            vector.fill_(1)
    limit[0] = resident_bytes()

    assert models.make_room(models["0"].full_bytes) <= 0

    assert sum(map(models.is_paged_in, models)) >= 5


class Full:
    """A place without room."""

    def keep(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        raise OSError("no room")

    def free_bytes(self) -> int:
        return 0


class Unreadable(HostMemory):
    """Host memory whose contents can't be read for a while."""

    can_read = False

    def keep(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Place`."""
        content = super().keep(vector)

        def read() -> torch.Tensor:
            if not self.can_read:
                raise RuntimeError("no memory in one piece")
            return content()

        return read


def test_a_model_for_which_memory_cannot_be_allocated_stays_paged_out() -> None:
    place = Unreadable(lambda: None)
    models = Models(place)
    model = models["m"] = TrainedModel(LORA, Trainable(TensorLayout([TensorSpec("w", (8,))])))
    model.trainable.gradient.fill_(3)
    models.page_out(["m"])

    models.page_in(["m"])

    assert not models.is_paged_in("m")
    assert all(vector.untyped_storage().size() == 0 for vector in model.vectors)
    place.can_read = True
    models.page_in(["m"])
    assert models.is_paged_in("m")
    assert model.trainable.gradient.tolist() == [3] * 8


def test_no_rank_pages_a_model_in_unless_the_head_says_so() -> None:
    models = DeviceMemory(place=HostMemory(lambda: None)).models
    models["m"] = TrainedModel(LORA, Trainable(TensorLayout([TensorSpec("w", (8,))])))
    models.page_out(["m"])

    with pytest.raises(RuntimeError, match="did not page it in first"):
        models["m"]

    models.page_in(["m"])
    assert models["m"].trainable.flat.numel() == 8


@pytest.mark.parametrize("room", [1, 2.5])
@pytest.mark.parametrize("models_in_files", [1, 2, 3, 4, 5])
def test_a_model_that_was_admitted_finds_room_for_the_rest_of_its_request(
    tmp_path: Path, room: float, models_in_files: float
) -> None:
    size = Machine(1, None).size
    machine = Machine(room, DiskFiles(tmp_path, int(models_in_files * size)))
    machine.add("first")
    machine.step("first", seed=0)
    batch = prepare(a_request(random_data([30, 30, 30])), machine.trainer.limits)
    pieces = machine.trainer.pieces(TrainingPass("first", batch), lambda: None)
    next(pieces)

    admitted = ["first"]

    def fill() -> None:
        for number in range(9):
            machine.add(str(number))
            admitted.append(str(number))

    with pytest.raises(Overloaded, match=r"\d+ bytes are missing where idle models are kept"):
        fill()
    next(pieces)

    for seed in range(3):
        for name in admitted:
            ours, theirs = machine.step(name, seed)
            assert machine.used() <= machine.size
            if name != "first":
                assert ours == theirs


def test_the_gradient_of_a_model_that_is_away_is_discarded_there(place: PagingPlace) -> None:
    machine = Machine(1, place)
    machine.add("first")
    run(machine.trainer, random_data([7]), model_id="first")
    machine.add("second")
    machine.size = 0

    machine.trainer.discard_gradient("first")

    assert machine.trainer.export_gradient("first") is None
    machine.size = held_models(machine.trainer)["second"].full_bytes
    ours, theirs = machine.step("first", seed=0)
    assert ours == theirs


@pytest.mark.parametrize("full", [Full(), None], ids=["a full place", "no place"])
def test_without_a_place_for_idle_models_the_next_one_gets_the_numbers(
    full: PagingPlace | None,
) -> None:
    machine = Machine(2.5, full)
    machine.add("first", "second")
    machine.step("first", seed=0)

    with pytest.raises(Overloaded, match="are reserved for the 2 models loaded here"):
        machine.trainer.add_model("third", LORA)

    machine.trainer.remove_model("second")
    machine.trainer.add_model("third", LORA)
    ours, theirs = machine.step("first", seed=1)
    assert ours == theirs


def test_the_files_of_a_head_have_the_configured_limit(tmp_path: Path) -> None:
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root="memory://",
        scratch_dir=str(tmp_path),
        limits=Limits(max_paged_bytes=1000),
    )
    trainer = build_trainer(config, lambda: TorchBaseModel(tiny_llama()), None)
    assert isinstance(trainer, TorchTrainer)
    place = held_models(trainer)._place
    assert isinstance(place, DiskFiles)

    kept = place.keep(torch.ones(200))
    with pytest.raises(OSError, match=r"200 bytes of .*idle_models"):
        place.keep(torch.ones(100))
    assert kept().sum() == 200


def test_processes_on_one_machine_divide_its_memory_and_its_disk(tmp_path: Path) -> None:
    alone, divided = DiskFiles(tmp_path, 1000), DiskFiles(tmp_path, 1000, processes=4)

    assert (alone.free_bytes(), divided.free_bytes()) == (1000, 250)
    with pytest.raises(OSError, match="400 bytes do not fit in 250 bytes"):
        divided.keep(torch.ones(100))
    assert part_of(lambda: 1001, 2)() == 500
    assert part_of(lambda: None, 2)() is None


def test_a_head_says_how_many_more_models_it_admits_with_those_that_are_away(
    tmp_path: Path,
) -> None:
    machine = Machine(2.5, None)
    machine.add("first")
    machine.step("first", seed=0)
    size = held_models(machine.trainer)["first"].full_bytes
    machine = Machine(2.5, DiskFiles(tmp_path, 6 * size))
    names = [f"m-{number}" for number in range(20)]
    for name in names[:3]:
        machine.add(name)
        machine.step(name, seed=0)
    capacity = machine.trainer.capacity
    assert capacity is not None
    assert capacity.more_models is not None

    with suppress(Overloaded):
        for name in names[3:]:
            machine.add(name)
            machine.step(name, seed=0)

    assert 3 + capacity.more_models == len(held_models(machine.trainer)) > 3
    full = machine.trainer.capacity
    assert full is not None
    assert full.more_models == 0


def test_no_room_is_reported_for_a_model_that_is_larger_than_the_device(place: PagingPlace) -> None:
    machine = Machine(2.5, place)
    for name in NAMES:
        machine.add(name)
        machine.step(name, seed=0)
    capacity = machine.trainer.capacity
    assert capacity is not None
    size = held_models(machine.unlimited)["m"].full_bytes

    assert capacity.more_of(2 * size) > 0
    assert capacity.more_of(4 * size) == 0

    with pytest.raises(Overloaded):
        machine.trainer.add_model("too large", LoraConfig(rank=16))
    machine.trainer.add_model("large", LoraConfig(rank=8))


def test_a_model_that_is_removed_while_it_is_away_is_gone(place: PagingPlace) -> None:
    machine = Machine(1, place)
    machine.add("first", "second")
    machine.trainer.remove_model("first")

    machine.add("first")

    ours, theirs = machine.step("first", seed=0)
    assert ours == theirs
