"""How many models fit follows from what they take, and from what passes were measured to take."""

import contextlib
from pathlib import Path

import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.device.accelerator import peak_meter
from tinkercloud_worker.device.pass_memory import HostPeak, PassMemory
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

RANK_4 = LoraConfig(rank=4, seed=1)
MIB = 1 << 20


class Gauge:
    """A meter that shows what the test says."""

    def __init__(self) -> None:
        self.peak: int | None = 0

    def begin(self) -> None:
        """Do nothing."""

    def peak_bytes(self) -> int | None:
        """Return what the test says."""
        return self.peak


class Machine:
    """A trainer on a device with memory for the passes of most requests, and for some models."""

    def __init__(self, models: float) -> None:
        self.gauge, self.memory, self.model_bytes = Gauge(), 0, 0
        self.trainer = TorchTrainer(
            TorchBaseModel(tiny_llama()),
            max_batch_tokens=256,
            memory=ModelMemory(self._available, meter=self.gauge),
        )
        unlimited = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=256)
        unlimited.add_model("m", RANK_4)
        weights = unlimited.copy_weights("m").tensors.values()
        self.model_bytes = 16 * sum(each.numel() for each in weights)
        self.memory = int(models * self.model_bytes) + KEPT_FREE_BYTES

    def _available(self) -> int:
        # A trainer measures its memory before it is complete.
        if not hasattr(self, "trainer"):
            return self.memory
        # As on a CPU, where a gradient takes no memory before the first pass.
        models = held_models(self.trainer).values()
        promised = sum(model.unused_bytes for model in models)
        return self.memory + promised - sum(model.full_bytes for model in models)

    def step(self, model: str) -> None:
        """Train a model a little."""
        batch = prepare(a_request(random_data([4, 3], seed=1)), self.trainer.limits)
        self.trainer.forward_backward(model, batch)
        self.trainer.optim_step(model, AdamParams())

    def fill(self) -> int:
        """Create models until one is refused; return how many there are."""
        with contextlib.suppress(Overloaded):
            while len(held_models(self.trainer)) < 100:
                self.trainer.add_model(f"filler-{len(held_models(self.trainer))}", RANK_4)
        return len(held_models(self.trainer))


def test_the_memory_of_a_trainer_is_known_before_its_first_model() -> None:
    free = 1 << 20
    trainer = TorchTrainer(
        TorchBaseModel(tiny_llama()),
        max_batch_tokens=256,
        memory=ModelMemory(lambda: KEPT_FREE_BYTES + free),
    )

    reported = trainer.capacity

    assert reported is not None
    assert (reported.held, reported.free_bytes, reported.more_models) == ((), free, None)
    assert reported.rank_bytes is not None
    assert reported.more_of(reported.rank_bytes) == free // reported.rank_bytes


@pytest.mark.parametrize("trained", [1, 2])
def test_as_many_models_are_admitted_as_the_reported_capacity_says(trained: int) -> None:
    machine = Machine(models=5.5)
    for number in range(trained):
        machine.trainer.add_model(str(number), RANK_4)
        machine.step(str(number))

    machine.trainer.add_model("last", RANK_4)

    reported = machine.trainer.capacity
    assert reported is not None
    assert (reported.models, reported.model_bytes) == (trained + 1, machine.model_bytes)
    assert reported.more_models == 5 - reported.models
    assert machine.fill() == reported.models + reported.free_bytes // reported.model_bytes == 5


def test_as_many_small_models_are_admitted_next_to_a_large_one_as_the_capacity_says() -> None:
    machine = Machine(models=3.5)
    machine.trainer.add_model("large", RANK_4)
    machine.step("large")
    reported = machine.trainer.capacity
    assert reported is not None
    assert reported.rank_bytes is not None
    assert reported.held == ("large",)

    with contextlib.suppress(Overloaded):
        while len(held_models(machine.trainer)) < 100:
            name = f"small-{len(held_models(machine.trainer))}"
            machine.trainer.add_model(name, LoraConfig(rank=1))

    more = reported.more_of(reported.rank_bytes)
    assert 1 + more == len(held_models(machine.trainer)) > 4


def test_a_pass_that_took_more_than_passes_usually_do_leaves_room_for_fewer_models() -> None:
    machine = Machine(models=5.5)
    machine.trainer.add_model("m", RANK_4)
    machine.step("m")
    machine.gauge.peak = KEPT_FREE_BYTES + 2 * machine.model_bytes
    machine.step("m")
    machine.gauge.peak = 0
    machine.step("m")

    assert machine.fill() == 3

    large = KEPT_FREE_BYTES + 2 * machine.model_bytes
    with pytest.raises(Overloaded, match=f"{large} are kept free for passes"):
        machine.trainer.add_model("more", RANK_4)
    reported = machine.trainer.capacity
    assert reported is not None
    assert (reported.pass_bytes, reported.models, reported.more_models) == (large, 3, 0)


def test_a_pass_that_allocates_what_its_model_keeps_is_not_measured() -> None:
    machine = Machine(models=5.5)
    machine.trainer.add_model("m", RANK_4)
    machine.gauge.peak = 8 * KEPT_FREE_BYTES

    machine.step("m")

    assert machine.fill() == 5


def test_large_passes_are_forgotten_after_many_small_ones() -> None:
    gauge = Gauge()
    passes = PassMemory(gauge)
    for peak in (MIB, 5, None, *range(300)):
        gauge.peak = peak
        with passes.measured():
            pass

    assert passes.bytes == 299


def test_large_passes_keep_no_model_out_once_their_own_are_gone() -> None:
    machine = Machine(1)
    machine.trainer.add_model("m", RANK_4)
    machine.step("m")
    machine.gauge.peak = 2 * KEPT_FREE_BYTES
    machine.step("m")
    machine.trainer.remove_model("m")

    assert machine.fill() == 1


def test_what_a_computation_allocates_and_frees_is_measured_on_a_cpu() -> None:
    meter = peak_meter(torch.device("cpu"))
    meter.begin()
    torch.ones(64 * MIB // 4).sum()
    with_tensor = meter.peak_bytes()

    meter.begin()
    without = meter.peak_bytes()

    assert with_tensor is not None
    assert without is not None
    # The system counts the pages of each thread now and then.
    assert with_tensor > 56 * MIB > 8 * MIB > without


def test_where_the_system_does_not_say_enough_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  100 kB\n")

    for meter in (HostPeak(tmp_path), HostPeak(tmp_path / "missing")):
        meter.begin()

        assert meter.peak_bytes() is None


def test_a_peak_on_a_cpu_has_neither_what_was_there_before_nor_cached_files(tmp_path: Path) -> None:
    status, meter = tmp_path / "status", HostPeak(tmp_path)
    status.write_text("VmHWM:\t 900 kB\nVmRSS:\t 100 kB\nRssFile:\t 20 kB\n")
    meter.begin()
    status.write_text("VmHWM:\t 170 kB\nVmRSS:\t 120 kB\nRssFile:\t 35 kB\n")

    assert meter.peak_bytes() == (170 - 100 - 15) << 10
