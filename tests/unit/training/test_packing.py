"""Sequences one after another in a row: each is computed as if it were alone."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.models import (
    tiny_gemma2,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.engine.batch import packs
from tinkercloud_worker.packing import Packed

LENGTHS = (9, 4, 12)
lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@pytest.mark.parametrize(
    "make",
    [tiny_llama, tiny_qwen3, tiny_gpt2, tiny_qwen3_moe, lambda: tiny_mistral(window=5)],
    ids=["llama", "qwen3", "gpt2", "mixture", "window"],
)
def test_a_sequence_of_a_pack_is_computed_as_if_alone(make: Callable[[], PreTrainedModel]) -> None:
    base = BaseModel(make())
    torch.manual_seed(0)
    ids = torch.randint(0, base.vocab_size, (sum(LENGTHS),))

    with torch.no_grad():
        together = base.hidden_of(Packed(ids, LENGTHS), ())
        alone = [base.hidden_of(Packed(part, (len(part),)), ()) for part in ids.split(LENGTHS)]

    assert base.takes_packs
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-5)


def test_a_model_that_transformers_computes_eagerly_takes_one_sequence_at_a_time() -> None:
    assert not BaseModel(tiny_gemma2()).takes_packs


@given(lengths, st.integers(1, 500))
def test_every_example_is_in_one_pack_within_the_budget(sizes: list[int], budget: int) -> None:
    groups = packs(sizes, budget)

    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        assert sum(sizes[index] for index in group) <= budget or len(group) == 1


@given(lengths, st.integers(100, 500))
def test_at_most_one_pack_is_less_than_half_full(sizes: list[int], budget: int) -> None:
    totals = [sum(sizes[index] for index in group) for group in packs(sizes, budget)]

    assert sum(2 * total < budget for total in totals) <= 1


@given(lengths, st.integers(1, 500), st.randoms())
def test_the_packs_of_lengths_do_not_depend_on_their_order(
    sizes: list[int], budget: int, random: Random
) -> None:
    shuffled = list(sizes)
    random.shuffle(shuffled)

    def shape(order: list[int]) -> list[list[int]]:
        return [[order[index] for index in group] for group in packs(order, budget)]

    assert shape(sizes) == shape(shuffled)
