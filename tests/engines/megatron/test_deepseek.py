"""DeepSeek models on one megatron rank, in this process, against torch and Hugging Face.

Tolerances: logprobs 1e-5, LoRA gradients and the losses of ten steps 1e-4 relative.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.ranks.megatron import MegatronRank, megatron_trainer
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.small_models.quantizing import quantize
from tinkercloud_testing.training.trainers import assert_close, assert_equal, gradient_of, run
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers.deepseek import check, choose, routing_of
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 60]
LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=3e-3)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "v3": tiny_deepseek_v3,
    "v3, queries not compressed": lambda: tiny_deepseek_v3(q_lora_rank=None),
    "v3, positions not stretched, pairs apart": lambda: tiny_deepseek_v3(
        rope_parameters=PLAIN, rope_interleave=False
    ),
    "v3, weights as they are, one group": lambda: tiny_deepseek_v3(
        norm_topk_prob=False, n_group=1, topk_group=1
    ),
    "v2": tiny_deepseek_v2,
    "v2, greedy": lambda: tiny_deepseek_v2(topk_method="greedy"),
}


def pair(make: Callable[[], PreTrainedModel], folder: Path) -> tuple[MegatronRank, TorchTrainer]:
    """Return both trainers with the same adapter, whose B has moved off zero."""
    torch_trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=32)
    torch_trainer.add_model("m", LORA)
    run(torch_trainer, random_data([6, 9], seed=9))
    torch_trainer.optim_step("m", AdamParams(learning_rate=5e-2))
    megatron = megatron_trainer(str(save(make(), folder)), 1, 1)
    megatron.add_model("m", LORA)
    megatron.import_state("m", torch_trainer.export_state("m"))
    return megatron, torch_trainer


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_every_lora_gradient_equal_the_torch_trainers(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    megatron, torch_trainer = pair(MODELS[name], tmp_path)
    data = random_data(LENGTHS)

    got, expected = run(megatron, data), run(torch_trainer, data)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    assert_close(gradient_of(megatron), gradient_of(torch_trainer), rtol=1e-4)


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_logprobs_of_a_fresh_adapter_are_huggingfaces(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    megatron = megatron_trainer(str(save(MODELS[name](), tmp_path)), 1, 1)
    megatron.add_model("m", LORA)
    data = random_data(LENGTHS)

    output = run(megatron, data)

    reference = MODELS[name]().eval()
    for got, datum in zip(output.logprobs, data, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor(datum.tokens[None].astype(np.int64))).logits
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        expected = torch.log_softmax(logits[0], -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_attention_is_adapted_where_tinker_adapts_it(alone: timedelta, tmp_path: Path) -> None:
    megatron = megatron_trainer(str(save(tiny_deepseek_v3(), tmp_path)), 1, 1)
    megatron.add_model("m", LORA)
    run(megatron, random_data(LENGTHS))

    gradient = gradient_of(megatron)

    attention = ["kv_a_proj_with_mqa", "o_proj", "q_a_proj"]
    names = {f"model.layers.{n}.self_attn.{name}" for n in range(3) for name in attention}
    adapted = {name.partition(".lora_")[0] for name in gradient}
    assert {name for name in adapted if "self_attn" in name} == names
    # Of a fresh adapter only B has one.
    assert all(gradient[f"{name}.lora_B.weight"].any() for name in names)


def test_ten_steps_go_alike_and_a_state_moves_back(alone: timedelta, tmp_path: Path) -> None:
    trainers = pair(tiny_deepseek_v3, tmp_path)
    losses: list[list[float]] = []
    for trainer in trainers:
        losses.append([])
        for seed in range(10):
            losses[-1].append(run(trainer, random_data(LENGTHS, seed=seed)).metrics["loss:sum"])
            trainer.optim_step("m", ADAM)
    megatron, torch_trainer = trainers

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    torch_trainer.add_model("moved", LORA)
    torch_trainer.import_state("moved", megatron.export_state("m"))
    assert_equal(
        torch_trainer.copy_weights("moved").tensors, megatron.copy_weights("m").tensors, atol=0
    )
    there = run(torch_trainer, random_data(LENGTHS), model_id="moved")
    here = run(megatron, random_data(LENGTHS))
    np.testing.assert_allclose(
        np.concatenate(there.logprobs), np.concatenate(here.logprobs), atol=1e-5
    )


def test_layers_that_predict_further_tokens_are_not_read(alone: timedelta, tmp_path: Path) -> None:
    folder = save(tiny_deepseek_v3(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): torch.full_like(weight, 7.0)
        for name, weight in weights.items()
        if "layers.2." in name
    }
    # This distinguishes it from a layer that the configuration omits.
    further["model.layers.3.eh_proj.weight"] = torch.full((32, 64), 7.0)
    save_file(weights | further, folder / "model.safetensors", {"format": "pt"})
    megatron = megatron_trainer(str(folder), 1, 1)
    megatron.add_model("m", LORA)
    torch_trainer = TorchTrainer(TorchBaseModel(tiny_deepseek_v3()), max_batch_tokens=32)
    torch_trainer.add_model("m", LORA)

    got, expected = (run(trainer, random_data([9])) for trainer in (megatron, torch_trainer))

    np.testing.assert_allclose(got.logprobs[0], expected.logprobs[0], atol=1e-5)


@pytest.mark.parametrize("model", ["v2", "v2, greedy", "v3", "v3, one group"])
def test_experts_are_chosen_and_weighed_as_huggingface_does(model: str) -> None:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 16}
    sizes |= {"num_attention_heads": 2, "n_group": 4, "topk_group": 2}
    config: DeepseekV2Config | DeepseekV3Config
    router: DeepseekV2TopkRouter | DeepseekV3TopkRouter
    bias = None
    if model.startswith("v2"):
        method = "greedy" if "greedy" in model else "group_limited_greedy"
        config = DeepseekV2Config(**sizes, topk_method=method, routed_scaling_factor=3.0)
        router = DeepseekV2TopkRouter(config)
    else:
        one = {"n_group": 1, "topk_group": 1} if "one group" in model else {}
        config = DeepseekV3Config(**sizes | one)
        router = DeepseekV3TopkRouter(config)
        bias = router.e_score_correction_bias.normal_(std=0.3)
    router.weight.data.copy_(torch.eye(16))
    logits = torch.randn(200, 16)

    weights, chosen = choose(logits, bias, routing_of(config))

    _, theirs, experts = router(logits)
    expected = torch.zeros(200, 16).scatter(1, experts, theirs.detach())
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    assert torch.equal(chosen, torch.zeros(200, 16).scatter(1, experts, 1.0).bool())


def test_biases_of_experts_stay_float32_in_a_bfloat16_model(
    alone: timedelta, tmp_path: Path
) -> None:
    model = tiny_deepseek_v3()
    base = load(str(save(model, tmp_path)), torch.bfloat16, Parallelism(), Cpu())

    ours = base.module.decoder.layers[1].mlp.router.expert_bias

    theirs = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert not torch.equal(theirs, theirs.bfloat16().float())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [tiny_deepseek_v3, tiny_qwen3_moe])
def test_weights_in_blocks_of_float8_are_what_torch_reads_them_as(
    alone: timedelta, tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    folder = save(make(), tmp_path)
    quantize(folder, (24, 32))
    megatron = megatron_trainer(str(folder), 1, 1)
    megatron.add_model("m", LORA)
    torch_trainer = TorchTrainer(
        TorchBaseModel.load(str(folder), torch.float32), max_batch_tokens=32
    )
    torch_trainer.add_model("m", LORA)
    data = random_data(LENGTHS)

    got, expected = run(megatron, data), run(torch_trainer, data)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: .*does not support biases"),
        ({"n_shared_experts": 0}, "n_shared_experts: .*backend torch"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: .*a bfloat16 copy",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "weight_block_size None; .*a bfloat16 copy",
        ),
        (
            {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_unsupported_deepseek_settings_are_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tiny_deepseek_v3().config
    config.update(changes)
    config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModelError, match=message):
        megatron_trainer(str(tmp_path), 1, 1)


def test_down_projections_must_divide_evenly() -> None:
    config = DeepseekV3Config(q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=8)

    with pytest.raises(UnsupportedModelError, match=r"kv_lora_rank \+ .* 20 .*tensor_parallel 3"):
        check(config, Parallelism(tensor=3))
    with pytest.raises(UnsupportedModelError, match=r"q_lora_rank 6 .*tensor_parallel 4"):
        check(DeepseekV3Config(q_lora_rank=6), Parallelism(tensor=4))
