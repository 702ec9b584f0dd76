"""Packed sequences: each gives the same results as alone."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.families import SIZES
from tinkercloud_testing.small_models.models import (
    VOCAB_SIZE,
    tiny_gemma2,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import ModelLimits, bin_pack, prepare
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.packing import pack_all

LENGTHS = (9, 4, 12, 12, 12, 1, 1)
WINDOW = 9
"""Positions: shorter than a sequence of `LENGTHS`, longer than those of the check at the start."""
SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}


def a_deepseek_v32() -> PreTrainedModel:
    """Return a random model whose attention sees some positions only, of its own choice."""
    torch.manual_seed(4)
    config = DeepseekV32Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        index_topk=WINDOW,
        index_head_dim=16,
        index_n_heads=2,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    return DeepseekV32ForCausalLM(config)


def a_falcon_h1() -> PreTrainedModel:
    """Return a random model that carries a little on from each position to all that follow."""
    torch.manual_seed(5)
    mamba: dict[str, Any] = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    }
    config = FalconH1Config(
        **SIZES | {"initializer_range": 0.02}, **mamba, mamba_n_groups=1, mamba_chunk_size=16
    )
    return FalconH1ForCausalLM(config)


def a_phimoe() -> PreTrainedModel:
    """Return a random model whose window is in masks only."""
    torch.manual_seed(1)
    config = PhimoeConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    )
    return PhimoeForCausalLM(config)


def a_qwen2() -> PreTrainedModel:
    """Return a random model whose first layer alone has a window, of which it tells attention."""
    torch.manual_seed(2)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **SLIDING))


def a_qwen2_moe(**sliding: Any) -> PreTrainedModel:
    """Return a random model whose windows, if it has some, are in masks only."""
    torch.manual_seed(3)
    config = Qwen2MoeConfig(
        **SIZES,
        **sliding,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    )
    return Qwen2MoeForCausalLM(config)


lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@pytest.mark.parametrize(
    "make",
    [
        tiny_llama,
        tiny_qwen3,
        tiny_gpt2,
        tiny_qwen3_moe,
        a_qwen2_moe,
        a_qwen2,
        lambda: tiny_mistral(window=5),
        lambda: tiny_mistral(window=WINDOW),
    ],
    ids=["llama", "qwen3", "gpt2", "mixture", "no window", "some windows", "short", "window"],
)
def test_a_sequence_of_a_pack_is_computed_as_if_alone(make: Callable[[], PreTrainedModel]) -> None:
    base = TorchBaseModel(make())
    torch.manual_seed(0)
    ids = torch.randint(0, base.vocab_size, (sum(LENGTHS),))

    with torch.no_grad():
        together = base.hidden_of(PackedSequences(ids, LENGTHS), ())
        alone = [
            base.hidden_of(PackedSequences(part, (len(part),)), ()) for part in ids.split(LENGTHS)
        ]

    assert base.takes_packs
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-5)


def test_a_model_that_transformers_computes_eagerly_takes_one_sequence_at_a_time() -> None:
    assert not TorchBaseModel(tiny_gemma2()).takes_packs


def test_a_model_that_leaks_state_to_the_next_sequence_does_not_take_packs() -> None:
    assert TorchBaseModel(tiny_llama()).takes_packs
    assert not TorchBaseModel(a_falcon_h1()).takes_packs


@pytest.mark.parametrize(
    "make",
    [a_phimoe, lambda: a_qwen2_moe(**SLIDING), a_deepseek_v32],
    ids=["phimoe", "qwen2_moe", "deepseek_v32"],
)
def test_windows_that_only_masks_express_hold_in_a_batch_too(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = make().eval()
    trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=2, seed=1, train_mlp=False))
    data = random_data(LENGTHS)

    output = run(trainer, data)

    for ours, datum in zip(output.logprobs, data, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(datum.tokens[None].astype(np.int64))).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        theirs = logits.log_softmax(-1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@given(lengths, st.integers(1, 500))
def test_every_example_is_in_one_pack_within_the_budget(sizes: list[int], budget: int) -> None:
    groups = bin_pack(sizes, budget)

    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        assert sum(sizes[index] for index in group) <= budget or len(group) == 1


@given(lengths, st.integers(1, 500), st.sampled_from([1, 6, 64]))
def test_packs_are_within_the_budget_as_long_as_ranks_that_divide_examples_make_them(
    sizes: list[int], budget: int, multiple: int
) -> None:
    batch = prepare(a_request(random_data(sizes)), ModelLimits(VOCAB_SIZE, 1 << 10))

    packed = pack_all(batch, budget, torch.device("cpu"), multiple)

    for pack in packed:
        computed = [-(-size // multiple) * multiple for size in pack.sequences.lengths]
        assert sum(computed) <= budget or len(computed) == 1


@given(lengths, st.integers(100, 500))
def test_at_most_one_pack_is_less_than_half_full(sizes: list[int], budget: int) -> None:
    totals = [sum(sizes[index] for index in group) for group in bin_pack(sizes, budget)]

    assert sum(2 * total < budget for total in totals) <= 1


@given(lengths, st.integers(1, 500), st.randoms())
def test_the_packs_of_lengths_do_not_depend_on_their_order(
    sizes: list[int], budget: int, random: Random
) -> None:
    shuffled = list(sizes)
    random.shuffle(shuffled)

    def shape(order: list[int]) -> list[list[int]]:
        return [[order[index] for index in group] for group in bin_pack(order, budget)]

    assert shape(sizes) == shape(shuffled)
