"""Adapters of models with Mamba layers are files that PEFT loads with its default flags."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.families import ONE_BY_ONE, SIZES
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

ADAM = AdamParams(learning_rate=0.1)
DATA = random_data([9, 5], seed=3)


def mamba2() -> Mamba2ForCausalLM:
    torch.manual_seed(3)
    config = Mamba2Config(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=16,
        initializer_range=0.2,
    )
    model = Mamba2ForCausalLM(config)
    model.eval()
    return model


def falcon_mamba() -> FalconMambaForCausalLM:
    torch.manual_seed(3)
    model = FalconMambaForCausalLM(FalconMambaConfig(state_size=8, **SIZES))
    model.eval()
    return model


def nemotron_h() -> NemotronHForCausalLM:
    torch.manual_seed(3)
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    config = NemotronHConfig(
        **sizes,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
    )
    model = NemotronHForCausalLM(config)
    model.eval()
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "Mamba 2": mamba2,
    "Mamba": ONE_BY_ONE["recurrent, Mamba"],
    "Falcon Mamba": falcon_mamba,
    "Nemotron-H": nemotron_h,
    "Falcon-H1": ONE_BY_ONE["hybrid, Falcon-H1"],
    "Bamba": ONE_BY_ONE["hybrid, Bamba"],
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("family", MAKERS)
def test_peft_loads_what_was_trained_and_computes_the_same(family: str, tmp_path: Path) -> None:
    trainer = TorchTrainer(TorchBaseModel(MAKERS[family]()), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=2, seed=1))
    for _ in range(2):
        run(trainer, DATA)
        trainer.optim_step("m", ADAM)
    snapshot = trainer.copy_weights("m")
    for name, content in formats.encode_weights(snapshot, family).items():
        (tmp_path / name).write_bytes(content)

    model = peft.PeftModel.from_pretrained(MAKERS[family](), str(tmp_path)).eval()

    # PEFT refuses these for some of the families only.
    assert any("out_proj" in name for name in snapshot.tensors) == (family == "Bamba")
    for datum, ours in zip(DATA, run(trainer, DATA).logprobs, strict=True):
        with torch.no_grad():
            ids = torch.tensor(datum.tokens[None].astype(np.int64))
            logits = model(input_ids=ids).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        theirs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)
