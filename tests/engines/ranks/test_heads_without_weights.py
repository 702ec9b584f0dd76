"""A session head with training ranks and inference servers holds no copy of the model."""

from pathlib import Path
from typing import Never

import pytest

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.run_head import build_backend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


def refuse(*_arguments: object, **_options: object) -> Never:
    raise AssertionError("the head loads the model")


def test_the_weights_are_loaded_by_the_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = InferenceConfig(kind="vllm", urls=("http://127.0.0.1:9",))
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(save(tiny_llama(), tmp_path / "model"))),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
        trainer=TrainerConfig(ranks=1),
        sampler=SamplerConfig(backend="external", inference=servers),
    )
    # In this process, which is the head's, and not in the rank's.
    monkeypatch.setattr(TorchBaseModel, "load", refuse)

    backend = build_backend(config)

    trainer = backend.trainer
    assert isinstance(trainer, RankedTrainer)
    trainer.add_model("run", LoraConfig(rank=4, seed=1))
    assert trainer.copy_weights("run").tensors
    measured = trainer.capacity
    assert measured is not None
    assert measured.models == 1
    assert trainer.memory_bytes("run") == measured.model_bytes > 0
    assert 0 < measured.free_bytes < 1 << 50
    trainer.close()
    backend.thread.stop()
