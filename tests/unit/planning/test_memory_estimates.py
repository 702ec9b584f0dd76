"""Estimates against what the torch trainer and transformers allocate on this machine.

Nothing here measures a GPU: its kernels keep other activations than these do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_planning.activations import FUSED, SEPARATE, layer_values
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import gpu
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import (
    GpuMemory,
    kv_bytes_per_token,
    sampling,
    training,
)
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.models import (
    in_dtype,
    smollm2,
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.activations import RANK, built, bytes_of, kept
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = pytest.mark.timeout(120)

PUBLIC_MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "public_models.json").read_text()
)
SUPPORT = Path(__file__).parents[2] / "support"
TOKENS = 256
SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
QUARTERED = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def of_text(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a vision-language model with a changed language model."""
    config = PUBLIC_MODELS[name]["config"]
    seen = config["vision_config"] | {"hidden_size": 64, "out_hidden_size": changes["hidden_size"]}
    text = config.get("text_config", config) | changes
    nested = {"text_config": text} if "text_config" in config else text
    return {**config, **nested, "vision_config": seen}


# Layers of small models, and of a quarter of their widths some that only the torch trainer takes:
# Llama-3.1-8B, were its attention biased, and Mistral-7B-v0.1 with its windows.
FUSED_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3": PUBLIC_MODELS["Qwen/Qwen3-0.6B"]["config"] | SMALL,
    "Qwen2": PUBLIC_MODELS["Qwen/Qwen2.5-0.5B"]["config"] | SMALL,
    "Llama": PUBLIC_MODELS["meta-llama/Llama-3.1-8B"]["config"]
    | SMALL
    | QUARTERED
    | {"attention_bias": True},
    "Mistral": PUBLIC_MODELS["mistralai/Mistral-7B-v0.1"]["config"] | SMALL | QUARTERED,
    "Gemma 3": of_text("google/gemma-3-4b-it", SMALL | QUARTERED),
}
# Liger does not fit these: they keep what they keep without it.
UNFUSED_SHAPES = {
    "Qwen2.5-VL": of_text("Qwen/Qwen2.5-VL-7B-Instruct", SMALL | QUARTERED),
    "Qwen3-VL": of_text("Qwen/Qwen3-VL-8B-Instruct", SMALL | QUARTERED),
}
# A mixture that only the torch trainer takes has windows: they change nothing of what is kept.
FUSED_MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": PUBLIC_MODELS["mistralai/Mixtral-8x7B-v0.1"]["config"] | SMALL | QUARTERED,
    "Qwen3-MoE": PUBLIC_MODELS["Qwen/Qwen3-30B-A3B"]["config"]
    | SMALL
    | {"hidden_size": 1024, "moe_intermediate_size": 384, "num_experts": 16},
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")


def a_smollm2() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)


every_model = pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, a_smollm2])
tiny_models = pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])


def architecture_of(model: PreTrainedModel) -> Architecture:
    return read(model.config.to_dict())


def planned(
    architecture: Architecture, layout: Layout, *, tokens: int, lora_rank: int | None = RANK
) -> GpuMemory:
    return training(architecture, layout, tokens=tokens, lora_rank=lora_rank, kernels=SEPARATE)


def trained_bytes(model: PreTrainedModel, config: LoraConfig | None) -> int:
    """Return what the torch trainer holds of a model that has taken a step."""
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=64)
    trainer.add_model("m", config)
    trainer.optim_step("m", AdamParams())
    held = held_models(trainer)["m"]
    moments = [t for t in held.optimizer.state[held.trainable.flat].values() if t.ndim]
    return bytes_of([held.trainable.flat, held.trainable.gradient, *moments])


def saved_bytes(model: torch.nn.Module, trunk: torch.nn.Module, hidden: int) -> int:
    """Return what a forward pass of so many TOKENS keeps for the backward pass."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inputs = torch.randn(1, TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trunk(inputs_embeds=inputs, use_cache=False)
    return bytes_of(t for t in saved if t.untyped_storage().data_ptr() not in weights)


def shortened(name: str, layers: int) -> dict[str, Any]:
    """Return the configuration of a public model with few layers and a small vocabulary."""
    return {**PUBLIC_MODELS[name]["config"], "num_hidden_layers": layers, "vocab_size": 512}


def adapted(model: PreTrainedModel) -> PeftModel:
    config = PeftConfig(r=RANK, target_modules="all-linear")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def kept_by_the_trainer(config: dict[str, Any], *, recompute: bool) -> int:
    """Return what a forward pass of the trainer keeps for the backward pass."""
    return kept(TorchBaseModel(built(config).eval()), TOKENS, recompute=recompute)


@pytest.fixture(scope="module")
def kept_with_liger() -> dict[str, float]:
    """Return by name the bytes that a layer keeps for each token with Liger's kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "tinkercloud_testing.training.activations"],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        input=json.dumps(FUSED_SHAPES | UNFUSED_SHAPES | FUSED_MIXTURES),
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    kept_of_layers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return kept_of_layers


@pytest.mark.parametrize(
    "make",
    [
        tiny_llama,
        tiny_qwen3,
        a_smollm2,
        tiny_qwen3_moe,
        tiny_mixtral,
        tiny_deepseek_v3,
        tiny_deepseek_v2,
    ],
)
def test_an_adapter_takes_what_is_estimated(make: Callable[[], PreTrainedModel]) -> None:
    model = make()

    estimate = planned(architecture_of(model), Layout(), tokens=1)

    assert trained_bytes(model, LoraConfig(rank=RANK)) == estimate.trained


@tiny_models
def test_a_fully_trained_model_takes_what_is_estimated(make: Callable[[], PreTrainedModel]) -> None:
    model = make()

    estimate = planned(architecture_of(model), Layout(), tokens=1, lora_rank=None)

    assert trained_bytes(model, None) == estimate.trained


@every_model
def test_weights_take_what_is_estimated(make: Callable[[], PreTrainedModel]) -> None:
    model = in_dtype(make(), torch.bfloat16)

    estimate = planned(architecture_of(model), Layout(), tokens=1)

    assert bytes_of(model.parameters()) == estimate.weights


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_deepseek_v3])
def test_keys_and_values_take_what_is_estimated(make: Callable[[], PreTrainedModel]) -> None:
    model = in_dtype(make(), torch.bfloat16)
    cache = DynamicCache()

    with torch.no_grad():
        model(torch.arange(TOKENS)[None] % 200, past_key_values=cache)

    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    held = bytes_of(t for layer in layers for t in (layer.keys, layer.values) if t is not None)
    assert held == TOKENS * kv_bytes_per_token(architecture_of(model), tensor=1)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen3-0.6B",
        pytest.param("meta-llama/Llama-3.2-1B", marks=pytest.mark.long),
    ],
)
def test_what_a_layer_keeps_is_estimated_within_a_tenth(name: str) -> None:
    one, two = (adapted(built(shortened(name, layers))) for layers in (1, 2))
    model = read(shortened(name, 2))

    measured = saved_bytes(two, two.model.model, model.hidden_size) - saved_bytes(
        one, one.model.model, model.hidden_size
    )

    estimate = TOKENS * layer_values(model, model.repeated, Layout(), RANK, SEPARATE)
    assert estimate == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-0.5B", pytest.param("meta-llama/Llama-3.2-1B", marks=pytest.mark.long)],
)
def test_what_the_torch_trainer_keeps_of_a_layer_is_estimated_within_a_tenth(name: str) -> None:
    three, two = (
        kept_by_the_trainer(shortened(name, layers), recompute=False) for layers in (3, 2)
    )

    model = read(shortened(name, 2))
    estimate = TOKENS * layer_values(model, model.repeated, Layout(), RANK, SEPARATE)
    assert estimate == pytest.approx(three - two, rel=0.1)


def estimated_with_liger(config: dict[str, Any]) -> float:
    """Return the bytes for each token that a layer of the torch trainer is estimated to keep.

    A layer's own input is no part of its values: it is kept whether they are or not.
    """
    model = read(config)
    kernels = FUSED if model.has_fused_kernels else SEPARATE
    its_input = 2 * model.hidden_size if kernels is FUSED else 0
    return layer_values(model, model.repeated, Layout(), RANK, kernels) + its_input


@pytest.mark.long
@pytest.mark.timeout(600)
@linux_only
@pytest.mark.parametrize("name", FUSED_SHAPES)
def test_what_a_layer_keeps_with_fused_kernels_is_estimated_within_a_hundredth(
    kept_with_liger: dict[str, float], name: str
) -> None:
    estimate = estimated_with_liger(FUSED_SHAPES[name])

    assert estimate == pytest.approx(kept_with_liger[name], rel=0.01)


@pytest.mark.long
@pytest.mark.timeout(600)
@linux_only
@pytest.mark.parametrize("name", UNFUSED_SHAPES)
def test_what_a_layer_keeps_where_fused_kernels_do_not_fit_is_estimated_within_a_tenth(
    kept_with_liger: dict[str, float], name: str
) -> None:
    estimate = estimated_with_liger(UNFUSED_SHAPES[name])

    assert estimate == pytest.approx(kept_with_liger[name], rel=0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
@linux_only
@pytest.mark.parametrize("name", FUSED_MIXTURES)
def test_of_mixtures_with_fused_kernels_no_more_is_kept_than_estimated_and_at_most_a_fifth_less(
    kept_with_liger: dict[str, float], name: str
) -> None:
    estimate = estimated_with_liger(FUSED_MIXTURES[name])

    assert 0.8 * estimate < kept_with_liger[name] <= estimate


@pytest.mark.filterwarnings("ignore:.*checkpoint.*")
def test_a_layer_that_is_computed_again_keeps_its_input_only() -> None:
    name = "Qwen/Qwen3-0.6B"
    two, four = (built(shortened(name, layers)) for layers in (2, 4))
    two.gradient_checkpointing_enable({"use_reentrant": False})
    four.gradient_checkpointing_enable({"use_reentrant": False})
    width = read(shortened(name, 2)).hidden_size

    measured = saved_bytes(four, four.model, width) - saved_bytes(two, two.model, width)

    estimates = [
        planned(read(shortened(name, layers)), Layout(), tokens=TOKENS) for layers in (2, 4)
    ]
    assert estimates[1].activations - estimates[0].activations == measured


@pytest.mark.long
def test_the_torch_trainer_keeps_the_inputs_of_layers_that_it_computes_again() -> None:
    name = "Qwen/Qwen3-0.6B"

    four, two = (kept_by_the_trainer(shortened(name, layers), recompute=True) for layers in (4, 2))

    estimates = [
        planned(read(shortened(name, layers)), Layout(), tokens=TOKENS) for layers in (2, 4)
    ]
    assert four - two == estimates[1].activations - estimates[0].activations


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"])
def test_ranks_together_hold_the_model_once_and_what_is_not_divided_often(name: str) -> None:
    model = read(PUBLIC_MODELS[name]["config"])

    whole = planned(model, Layout(), tokens=1).weights
    split = planned(model, Layout(tensor=8, expert=8, data=8), tokens=1).weights

    divided = 64 if model.experts else 8
    assert whole / divided < split < whole / 4


def keys_and_values(config: dict[str, Any]) -> int:
    """Return the numbers that attention has of a token's keys and values."""
    if "kv_lora_rank" not in config:
        return int(2 * config["num_key_value_heads"] * config["head_dim"])
    of_a_head = sum(config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    return int(config["num_attention_heads"] * of_a_head)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V2-Lite"])
def test_ranks_that_divide_sequences_each_hold_all_keys_and_values_of_a_layer(name: str) -> None:
    config = PUBLIC_MODELS[name]["config"]

    whole, quarter = (
        planned(read(config), Layout(context=ranks), tokens=4096).activations for ranks in (1, 4)
    )

    in_bfloat16_with_gradients = 4 * keys_and_values(config) * 4096
    assert quarter == pytest.approx(whole / 4 + in_bfloat16_with_gradients, abs=1)


def test_an_engine_gives_all_that_is_left_to_keys_and_values() -> None:
    model, kind = read(PUBLIC_MODELS["Qwen/Qwen3-8B"]["config"]), gpu("H100")

    memory = sampling(model, 1, gpu=kind, reserve=kind.reserve(1), lora_rank=RANK)

    assert memory.total == kind.memory
    assert memory.kv_cache > kind.memory // 2


@pytest.mark.parametrize(
    ("name", "gpus", "allocated"),
    [
        ("Qwen/Qwen3-0.6B", 1, 238_583_808),
        ("Qwen/Qwen3-8B", 1, 643_596_288),
        ("Qwen/Qwen3-8B", 2, 451_633_152),
        ("Qwen/Qwen3-30B-A3B", 1, 10_244_358_144),
        ("Qwen/Qwen3-30B-A3B", 4, 8_098_467_840),
        ("deepseek-ai/DeepSeek-V2-Lite", 1, 3_717_513_216),
        ("deepseek-ai/DeepSeek-V3", 8, 67_511_771_136),
    ],
)
def test_adapters_take_as_much_of_an_engine_as_sglang_s_own_pool_of_three_at_rank_32(
    name: str, gpus: int, allocated: int
) -> None:
    """As SGLang 0.5.23's LoRAMemoryPool allocates for the model on torch's device `meta`."""
    model, kind = read(PUBLIC_MODELS[name]["config"]), gpu("H100")

    memory = sampling(model, gpus, gpu=kind, reserve=kind.reserve(1), lora_rank=32)

    assert memory.trained == pytest.approx(allocated, rel=0.01)
