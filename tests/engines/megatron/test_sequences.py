"""Packed sequences: one rank needs no padding, and splitting over ranks is lossless."""

import gc
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.ranks.megatron import lengthen_examples, megatron_trainer
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.training.trainers import base_of, run
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.losses import LossInputs
from tinkercloud_worker.megatron_trainer.layers.sequence import MicroBatch, SequenceDivision
from tinkercloud_worker.training.packing import Pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]
lengths_of_sequences = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@dataclass
class Place:
    """What a process group says of itself."""

    ranks: int
    number: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def a_pack(lengths: list[int]) -> Pack:
    """Return sequences whose token ids are their places in the pack."""
    ids, none = torch.arange(sum(lengths)), torch.zeros(0, dtype=torch.int64)
    inputs = LossInputs({}, datum_of_row=none, num_data=0)
    sequences = PackedSequences(ids, tuple(lengths))
    return Pack(sequences=sequences, targets_RK=ids[:, None], inputs=inputs, examples=())


def parts(lengths: list[int], ranks: int) -> list[MicroBatch]:
    """Return what each rank holds of sequences."""
    divisions = [SequenceDivision(cast("Any", Place(ranks, number))) for number in range(ranks)]
    return [division.micro_batch([a_pack(lengths)], division.multiple) for division in divisions]


@given(lengths_of_sequences, st.integers(1, 4))
def test_ranks_hold_every_position_once(lengths: list[int], ranks: int) -> None:
    held = [part.places_M for part in parts(lengths, ranks)]

    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))


@given(
    st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=2, max_size=4).filter(any),
    st.integers(1, 4),
)
def test_a_rank_holds_of_each_model_in_company_what_it_holds_of_it_alone(
    models: list[list[int]], ranks: int
) -> None:
    packs = [a_pack(lengths) for lengths in models]
    for number in range(ranks):
        division = SequenceDivision(cast("Any", Place(ranks, number)))
        together = division.micro_batch(packs, division.multiple)
        for pack, part in zip(packs, together.parts, strict=True):
            if not pack.sequences.lengths:
                assert (part.rows.stop, part.held.stop) == (part.rows.start, part.held.start)
                continue
            alone = division.micro_batch([pack], division.multiple)
            assert torch.equal(together.kept_M[part.kept] - part.held.start, alone.kept_M)
            assert torch.equal(together.places_M[part.kept] - part.rows.start, alone.places_M)
            assert len(together.ids_S[part.held]) == len(alone.ids_S)


@given(lengths_of_sequences, st.integers(1, 4))
def test_the_parts_of_ranks_are_reassembled_in_order(lengths: list[int], ranks: int) -> None:
    held = parts(lengths, ranks)
    order = held[0].sequences.order_P

    ids = torch.cat([part.ids_S for part in held])
    kept = torch.cat([torch.zeros_like(part.ids_S).index_fill(0, part.kept_M, 1) for part in held])
    if order is not None:
        ids, kept = ids[order], kept[order]

    assert torch.equal(ids[kept.bool()], torch.arange(sum(lengths)))


@given(lengths_of_sequences, st.integers(1, 4))
def test_ranks_have_equal_attention_work(chunks: list[int], ranks: int) -> None:
    lengths = [2 * ranks * chunk for chunk in chunks]
    seen = torch.cat([torch.arange(length) + 1 for length in lengths])

    works = {int(seen[part.places_M].sum()) for part in parts(lengths, ranks)}

    assert len(works) == 1


def test_one_rank_computes_positions_of_examples_only(alone: timedelta, tmp_path: Path) -> None:
    megatron = megatron_trainer(str(save(tiny_llama(), tmp_path)), 1, 1)
    megatron.add_model("m", LoraConfig(rank=4, seed=1))
    computed: list[int] = []
    layer = base_of(megatron).module.decoder.layers[0]
    layer.self_attention.register_forward_pre_hook(
        lambda _, inputs: computed.append(inputs[0].shape[0] * inputs[0].shape[1])
    )

    run(megatron, random_data([5, 17, 3, 11]))

    assert sum(computed) == 5 + 17 + 3 + 11


def test_micro_batches_are_within_the_budget_where_examples_are_lengthened(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron = megatron_trainer(str(save(tiny_llama(), tmp_path)), 1, 1)
    megatron.add_model("m", LoraConfig(rank=4, seed=1))
    # As with tensor parallelism 4, or context parallelism 2 of tensor parallelism 2.
    lengthen_examples(megatron, 8)

    run(megatron, random_data([3] * 20))

    assert megatron.positions() == [BATCH_TOKENS] * 5


def test_angles_of_positions_are_one_table_whatever_lengths_there_were(
    alone: timedelta, tmp_path: Path
) -> None:
    model = tiny_llama()
    megatron = megatron_trainer(str(save(model, tmp_path)), 1, 1)
    megatron.add_model("m", LoraConfig(rank=4, seed=1))
    short, longer = random_data([5, 3]), [random_data([length, 4]) for length in (9, 17, 12)]

    before = run(megatron, short)
    for data in longer:
        run(megatron, data)
    after = run(megatron, short)

    np.testing.assert_array_equal(np.concatenate(after.logprobs), np.concatenate(before.logprobs))
    gc.collect()
    shape = (1, 1, model.config.head_dim)
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    tables = [tensor for tensor in tensors if tensor.shape[1:] == shape]
    assert [len(table) for table in tables] == [17]
