"""Adapters of experts with the torch trainer against their definition: a delta for each expert.

The reference is Hugging Face's model with experts computed one by one.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.checkpoint_manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_datum, a_request, random_data
from tinkercloud_testing.small_models.families import SLOTTED
from tinkercloud_testing.small_models.models import in_dtype, tiny_mixtral, tiny_qwen3_moe
from tinkercloud_testing.training.engines import a_sampling_request, an_engine
from tinkercloud_testing.training.trainers import assert_close, base_of, held_models, run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.sampling.sampler_interface import StopRules
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LENGTHS = [5, 17, 3, 11]
NEVER = StopRules(frozenset(), ())
RANK = 4
SCALE = 32 / RANK
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_qwen3_moe,
    "qwen3, shares among all": lambda: tiny_qwen3_moe(normed=False),
    "mixtral": tiny_mixtral,
    "gpt-oss": SLOTTED["sinks"],
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LEAVES = {"qwen3_moe": PROJECTIONS, "mixtral": ("w1", "w3", "w2"), "gpt_oss": PROJECTIONS}
PREFIXES = {
    "qwen3_moe": "mlp.experts",
    "mixtral": "block_sparse_moe.experts",
    "gpt_oss": "mlp.experts",
}


def a_trainer(
    model: PreTrainedModel, lora_config: LoraConfig | None = None, **options: Any
) -> TorchTrainer:
    """Return a trainer of an adapter "m", whose B are not zero."""
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=24, **options)
    trainer.add_model("m", lora_config or LoraConfig(rank=RANK, seed=1))
    perturb(trainer, "m")
    return trainer


def perturb(trainer: TorchTrainer, model_id: str, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in held_models(trainer)[model_id].trainable.tensors.items():
        if "lora_B" in name:
            tensor.detach().normal_(0, 0.05, generator=generator)


def gradients(trainer: TorchTrainer, model_id: str = "m") -> dict[str, Tensor]:
    tensors = held_models(trainer)[model_id].trainable.tensors
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def logprobs(model: nn.Module, datum: Datum) -> Tensor:
    ids = torch.tensor(datum.tokens[None].astype(np.int64))
    targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
    return torch.log_softmax(model(input_ids=ids).logits[0], -1).gather(1, targets)[:, 0]


def of_expert(stacked: Tensor, number: int) -> Tensor:
    """Return an expert's own part, or what all of them share."""
    return stacked[number if len(stacked) > 1 else 0]


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def gpt_oss_gate(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class OneByOne(nn.Module):
    """The experts of a layer as their definition has them, each with an adapter."""

    def __init__(self, experts: nn.Module, adapters: dict[str, Tensor]) -> None:
        super().__init__()
        names = ("gate_up_proj", "down_proj")
        self.weights = [experts.get_parameter(name).detach() for name in names]
        self.biases: list[Tensor] = [
            experts.get_parameter(f"{name}_bias").detach()
            if experts.has_bias
            else torch.zeros(weight.shape[:2])
            for name, weight in zip(names, self.weights, strict=True)
        ]
        if experts.is_transposed:
            self.weights = [weight.transpose(1, 2) for weight in self.weights]
        if not experts.is_concatenated:
            self.weights[0] = torch.cat([self.weights[0][:, ::2], self.weights[0][:, 1::2]], 1)
            self.biases[0] = torch.cat([self.biases[0][:, ::2], self.biases[0][:, 1::2]], 1)
        self.activation = gpt_oss_gate if experts.has_bias else silu_gate
        self.adapters = adapters

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for token, chosen, shares in zip(hidden, index, weights, strict=True):
            pairs = zip(chosen.tolist(), shares, strict=True)
            rows.append(sum(share * self.expert(number, token) for number, share in pairs))
        return torch.stack(rows)

    def expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = self.weights[0][number].chunk(2)
        gate_bias, up_bias = self.biases[0][number].chunk(2)
        inner = self.activation(
            self.linear("gate", number, gate, x) + gate_bias,
            self.linear("up", number, up, x) + up_bias,
        )
        down = self.linear("down", number, self.weights[1][number], inner)
        return down + self.biases[1][number]

    def linear(self, leaf: str, number: int, weight: Tensor, x: Tensor) -> Tensor:
        a, b = (of_expert(self.adapters[f"{leaf}.{half}"], number) for half in "AB")
        return weight @ x + SCALE * (b @ (a @ x))


class Twin:
    """A Hugging Face model with the trainer's adapter, computed by autograd throughout."""

    def __init__(self, model: PreTrainedModel, trainer: TorchTrainer) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        kind = model.config.model_type
        self.tensors = {
            name: tensor.clone().requires_grad_()
            for name, tensor in trainer.copy_weights("m").tensors.items()
        }
        for number, layer in enumerate(model.model.layers):
            names = zip(("gate", "up", "down"), LEAVES[kind], strict=True)
            prefix = f"model.layers.{number}.{PREFIXES[kind]}"
            layer.mlp.experts = OneByOne(
                layer.mlp.experts,
                {
                    f"{ours}.{half}": self.tensors[f"{prefix}.{leaf}.lora_{half}.weight"]
                    for ours, leaf in names
                    for half in "AB"
                },
            )
        for name, module in model.named_modules():
            a = self.tensors.get(f"{name}.lora_A.weight")
            if isinstance(module, nn.Linear) and a is not None:
                b = self.tensors[f"{name}.lora_B.weight"]
                module.register_forward_hook(
                    lambda _m, x, y, a=a, b=b: y + SCALE * (x[0] @ a.T) @ b.T
                )


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_every_gradient_are_those_of_experts_adapted_one_by_one(name: str) -> None:
    trainer, data = a_trainer(MODELS[name]()), random_data(LENGTHS)
    twin = Twin(MODELS[name](), trainer)

    output = run(trainer, data)

    total = torch.zeros(())
    for got, datum in zip(output.logprobs, data, strict=True):
        expected = logprobs(twin.model, datum)
        np.testing.assert_allclose(got, expected.detach(), atol=1e-5)
        total = total - (expected * torch.tensor(datum.inputs["weights"])).sum()
    total.backward()
    ours = gradients(trainer)
    assert sum("experts" in name for name in ours) == 12
    assert_close(
        ours, {n: t.grad for n, t in twin.tensors.items() if t.grad is not None}, rtol=1e-4
    )


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_model_with_the_deltas_in_its_weights(name: str) -> None:
    trainer, merged = a_trainer(MODELS[name]()), MODELS[name]().eval()
    kind = merged.config.model_type
    tensors = trainer.copy_weights("m").tensors

    def delta(target: str) -> Tensor:
        return SCALE * tensors[f"{target}.lora_B.weight"] @ tensors[f"{target}.lora_A.weight"]

    with torch.no_grad():
        for number, layer in enumerate(merged.model.layers):
            prefix = f"model.layers.{number}.{PREFIXES[kind]}"
            gate, up, down = (delta(f"{prefix}.{leaf}") for leaf in LEAVES[kind])
            experts = layer.mlp.experts
            if experts.is_transposed:
                experts.gate_up_proj += torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
                experts.down_proj += down.transpose(1, 2)
            else:
                experts.gate_up_proj += torch.cat([gate, up], 1)
                experts.down_proj += down
        for target, module in merged.named_modules():
            if f"{target}.lora_A.weight" in tensors:
                module.weight += delta(target)
    data = random_data(LENGTHS)

    output = run(trainer, data)

    for got, datum in zip(output.logprobs, data, strict=True):
        np.testing.assert_allclose(got, logprobs(merged, datum).detach(), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_files_hold_each_expert_by_the_name_of_its_weights_and_are_read_back(name: str) -> None:
    trainer = a_trainer(MODELS[name]())
    weights, kind = trainer.copy_weights("m"), MODELS[name]().config.model_type

    files = formats.encode_for_servers(weights, "base")

    tensors = load(files[ADAPTER_WEIGHTS])
    for leaf in LEAVES[kind]:
        prefix = f"model.layers.1.{PREFIXES[kind]}"
        for half in "AB":
            stacked = weights.tensors[f"{prefix}.{leaf}.lora_{half}.weight"]
            for expert in range(4):
                own = tensors[f"base_model.model.{prefix}.{expert}.{leaf}.lora_{half}.weight"]
                assert torch.equal(own, of_expert(stacked, expert))
    assert all(tensor.ndim == 2 for tensor in tensors.values())
    config = json.loads(files[ADAPTER_CONFIG])
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(config["target_modules"]) == {*attention, *LEAVES[kind], "lm_head"}
    back = adapters.from_peft_names(tensors)
    assert back.keys() == weights.tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.tensors.items())


@pytest.mark.parametrize("broken", ["missing", "of another rank", "not what others share"])
def test_a_file_with_missing_or_different_experts_is_rejected_by_name(broken: str) -> None:
    tensors = adapters.to_peft_names(a_trainer(tiny_qwen3_moe()).copy_weights("m").tensors)
    name = "base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_A.weight"
    own = tensors.pop(name)
    if broken == "of another rank":
        tensors[name] = own[:2]
    if broken == "not what others share":
        tensors[name] = own + 1

    with pytest.raises(InvalidRequest, match=r"mlp\.experts\.up_proj\.lora_A\.weight"):
        adapters.from_peft_names(tensors)


def test_experts_share_the_half_next_to_hidden_states_and_initialize_the_other_separately() -> None:
    trainer = TorchTrainer(TorchBaseModel(tiny_qwen3_moe()), max_batch_tokens=24)
    trainer.add_model("m", LoraConfig(rank=RANK, seed=1))
    tensors = trainer.copy_weights("m").tensors

    shapes = {
        name.removeprefix("model.layers.0.mlp.experts."): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if "layers.0.mlp.experts" in name
    }
    assert shapes == {
        "gate_proj.lora_A.weight": (1, RANK, 32),
        "gate_proj.lora_B.weight": (4, 24, RANK),
        "up_proj.lora_A.weight": (1, RANK, 32),
        "up_proj.lora_B.weight": (4, 24, RANK),
        "down_proj.lora_A.weight": (4, RANK, 24),
        "down_proj.lora_B.weight": (1, 32, RANK),
    }
    down = tensors["model.layers.0.mlp.experts.down_proj.lora_A.weight"]
    assert len({expert.sum().item() for expert in down}) == 4
    assert 0.9 / 24**0.5 < down.abs().max() <= 1 / 24**0.5
    assert not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.parametrize("lora_config", [LoraConfig(rank=3, seed=1), LoraConfig(rank=8, seed=1)])
def test_layers_recomputed_have_the_same_gradients(lora_config: LoraConfig) -> None:
    again = a_trainer(tiny_qwen3_moe(), lora_config, max_kept_tokens=0)
    kept = a_trainer(tiny_qwen3_moe(), lora_config)

    got, expected = (run(trainer, random_data(LENGTHS)) for trainer in (again, kept))

    np.testing.assert_array_equal(np.concatenate(got.logprobs), np.concatenate(expected.logprobs))
    assert_close(gradients(again), gradients(kept), rtol=1e-6)


def test_a_token_gets_the_same_alone_and_among_others() -> None:
    trainer, data = a_trainer(tiny_qwen3_moe()), random_data(LENGTHS)

    together = run(trainer, data)

    for got, datum in zip(together.logprobs, data, strict=True):
        np.testing.assert_allclose(got, run(trainer, [datum]).logprobs[0], atol=1e-5)


def test_training_moves_experts_and_leaves_the_base_as_it_is() -> None:
    trainer = a_trainer(tiny_qwen3_moe(), LoraConfig(rank=RANK, seed=1, train_attn=False))
    base = {name: w.clone() for name, w in base_of(trainer).named_weights().items()}
    data = random_data(LENGTHS)

    losses = []
    for _ in range(8):
        losses.append(run(trainer, data).metrics["loss:sum"])
        trainer.optim_step("m", AdamParams(learning_rate=2e-2))

    assert losses[-1] < 0.8 * losses[0]
    for name, weight in base_of(trainer).named_weights().items():
        assert torch.equal(weight, base[name]), name


def test_over_bfloat16_an_adapter_is_as_near_to_float32_as_the_rounding_allows() -> None:
    exact = a_trainer(tiny_qwen3_moe())
    half = a_trainer(in_dtype(tiny_qwen3_moe(), torch.bfloat16))
    data = random_data(LENGTHS)

    run(exact, data)
    run(half, data)

    for name, expected in gradients(exact).items():
        if "experts" in name:
            ours = gradients(half)[name]
            assert ours.dtype == torch.float32
            assert torch.cosine_similarity(ours.flatten(), expected.flatten(), 0) > 0.97, name


def test_experts_of_an_unsupported_form_are_rejected_by_name() -> None:
    model = tiny_qwen3_moe()
    for layer in model.model.layers:
        layer.mlp.experts.is_concatenated = False
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=24)

    with pytest.raises(InvalidRequest, match=r"train_mlp: true .*Qwen3MoeExperts.* to false"):
        trainer.add_model("m", LoraConfig(rank=RANK))
    trainer.add_model("m", LoraConfig(rank=RANK, train_mlp=False))
    with pytest.raises(InvalidRequest, match=r"full fine-tuning .*Qwen3MoeExperts.* a LoRA rank"):
        trainer.add_model("whole", None)


def test_a_convolution_is_not_taken_for_experts() -> None:
    model = tiny_qwen3_moe()
    model.model.layers[0].short = nn.Conv1d(4, 4, 3)
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=24)

    trainer.add_model("m", LoraConfig(rank=RANK))

    assert any("experts" in name for name in trainer.copy_weights("m").tensors)


# PEFT says of patterns of its own that they fit no module: they fit a parameter.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_peft_reads_the_files(name: str, tmp_path: Path) -> None:
    trainer = a_trainer(MODELS[name](), LoraConfig(rank=RANK, seed=1, train_unembed=False))
    for file, content in formats.encode_for_servers(trainer.copy_weights("m"), "base").items():
        (tmp_path / file).write_bytes(content)
    model = peft.PeftModel.from_pretrained(MODELS[name](), str(tmp_path)).eval()
    data = random_data(LENGTHS)

    output = run(trainer, data)

    for got, datum in zip(output.logprobs, data, strict=True):
        np.testing.assert_allclose(got, logprobs(model, datum).detach(), atol=1e-5)


async def test_the_logprobs_of_sampled_tokens_equal_the_trainers(tmp_path: Path) -> None:
    with an_engine(tiny_qwen3_moe(), tmp_path) as engine:
        for name, seed in {"one": 1, "two": 2}.items():
            engine.trainer.add_model(name, LoraConfig(rank=RANK, seed=seed))
            perturb(engine.trainer, name, seed)
            await engine.sampler.publish(name, engine.trainer.copy_weights(name))
        await engine.sampler.publish("base", None)
        prompt = [3, 1, 4, 1, 5]
        request = a_sampling_request(prompt, num_samples=2, max_tokens=8, stop=NEVER)

        results = await asyncio.gather(
            *(engine.sampler.sample(version, request) for version in ("one", "base", "two"))
        )

        assert len({tuple(result.sequences[0].logprobs) for result in results}) == 3
        for name, result in (("one", results[0]), ("two", results[2])):
            for sequence in result.sequences:
                ids = [*prompt, *sequence.tokens]
                batch = prepare(a_request([a_datum(ids)]), engine.trainer.limits)
                [trained] = engine.trainer.forward(name, batch).logprobs
                drawn = trained[len(prompt) - 1 : -1]
                np.testing.assert_allclose(sequence.logprobs, drawn, atol=1e-5)
