"""A model is only created if memory suffices for it and for the existing models."""

from pathlib import Path

import pytest

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_worker.device.memory import available_bytes
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

RANK_2, RANK_4 = LoraConfig(rank=2, seed=1), LoraConfig(rank=4, seed=1)


class Machine:
    """A trainer on a machine with as much memory as is said."""

    def __init__(self) -> None:
        self.available: int | None = None
        self.trainer = TorchTrainer(
            TorchBaseModel(tiny_llama()),
            max_batch_tokens=256,
            memory=ModelMemory(lambda: self.available),
        )

    def size_of(self, lora: LoraConfig | None) -> int:
        """Return the parameters of such a model."""
        unbounded = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=256)
        unbounded.add_model("m", lora)
        return sum(tensor.numel() for tensor in unbounded.copy_weights("m").tensors.values())


@pytest.mark.parametrize("lora", [None, RANK_2])
def test_a_model_that_exceeds_memory_is_rejected_with_numbers(
    lora: LoraConfig | None,
) -> None:
    machine = Machine()
    parameters = machine.size_of(lora)
    machine.available = KEPT_FREE_BYTES + 16 * parameters - 1

    with pytest.raises(Overloaded) as caught:
        machine.trainer.add_model("m", lora)

    message = caught.value.message
    assert f"has {parameters} parameters and takes {16 * parameters} bytes" in message
    assert f"{16 * parameters - 1} bytes are free" in message
    assert ("a fully fine-tuned model" if lora is None else "an adapter of rank 2") in message
    machine.available += 1
    machine.trainer.add_model("m", lora)


def test_pending_allocations_of_models_are_reserved() -> None:
    machine = Machine()
    need = 16 * machine.size_of(RANK_4)
    machine.available = KEPT_FREE_BYTES + need + need // 2
    machine.trainer.add_model("first", RANK_4)

    with pytest.raises(Overloaded, match="are reserved for the 1 models loaded here"):
        machine.trainer.add_model("second", RANK_4)
    machine.trainer.optim_step("first", AdamParams())
    machine.trainer.add_model("second", RANK_4)


def test_models_are_admitted_if_free_memory_is_unknown() -> None:
    machine = Machine()
    machine.trainer.add_model("m", None)


def test_a_container_has_as_much_memory_as_its_limit_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable: 2000 kB\nHugePages_Total: 0\n")
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    assert available_bytes(meminfo, cgroup) == 2000 * 1024

    for name, content in (
        ("memory.max", "1000000\n"),
        ("memory.current", "900000\n"),
        ("memory.stat", "anon 5\ninactive_file 50000\n"),
    ):
        (cgroup / name).write_text(content)
    assert available_bytes(meminfo, cgroup) == 150_000
    assert available_bytes(tmp_path / "none", cgroup) == 150_000
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, cgroup) == 2000 * 1024
    assert available_bytes(tmp_path / "none", cgroup) is None
