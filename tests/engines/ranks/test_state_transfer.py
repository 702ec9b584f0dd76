"""State transfer to ranks and back: a node holds one copy in memory for all readers."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ray
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.ranks.megatron import megatron_factory
from tinkercloud_testing.ranks.ranks import (
    BATCH_TOKENS,
    MeasuredTrainer,
    MortalTrainer,
    Receipt,
    TrainerOf,
    Trainers,
    bytes_in_store,
    often,
)
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.training.trainers import assert_equal, gradient_of, run
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.trainer import TrainingState
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.adam import AdamTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

RANKS = 2
ADAM = AdamParams(learning_rate=1e-2)
large_llama = partial(tiny_llama, hidden_size=512, layers=6)
"""170 MB of weights and moments: what a rank has of it is not lost in what else it does."""


@pytest.fixture(scope="module", params=often(("torch", "megatron"), ["megatron"]))
def trainers(
    request: pytest.FixtureRequest, trainer_of: TrainerOf, tmp_path_factory: pytest.TempPathFactory
) -> Trainers:
    """Return two ranks that hold a whole model between them, and one that has it to itself."""
    if request.param == "torch":
        factory: Callable[[], AdamTrainer] = partial(MeasuredTrainer, make=large_llama)
    else:
        folder = save(large_llama(), tmp_path_factory.mktemp("model"))
        factory = megatron_factory(str(folder), tensor=2, pipeline=1)
    single = TorchTrainer(TorchBaseModel(large_llama()), max_batch_tokens=BATCH_TOKENS)
    single.add_model("m", None)
    run(single, random_data([9, 4]))
    single.optim_step("m", ADAM)
    run(single, random_data([7, 3], seed=1))
    return trainer_of(RANKS, factory), single


def at_ranks(ranked: RankedTrainer, method: str) -> list[Any]:
    return ranked.group.current.call_each(method, [()] * RANKS)


def objects_in_stores() -> set[str]:
    """Return the ids of all objects that this process has references to."""
    gc.collect()
    worker: Any = ray._private.worker.global_worker
    return set(worker.core_worker.get_all_reference_counts())


def tensors_of(state: TrainingState) -> dict[str, torch.Tensor]:
    return {**state.weights.tensors, **(state.moments or {})}


def test_ranks_read_a_state_and_a_gradient_where_their_node_has_them_and_keep_their_parts_only(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    state, gradient = single.export_state("m"), gradient_of(single)
    size = sum(tensor.nbytes for tensor in tensors_of(state).values())
    ranked.add_model("m", None)
    before = at_ranks(ranked, "private_bytes")

    ranked.import_state("m", state)
    of_state = at_ranks(ranked, "last_receipt")
    after = at_ranks(ranked, "private_bytes")
    ranked.import_gradient("m", gradient)
    of_gradient = at_ranks(ranked, "last_receipt")

    assert [(each.size, each.shared) for each in of_state] == [(size, size)] * RANKS
    assert [(each.size, each.shared) for each in of_gradient] == [(size // 3, size // 3)] * RANKS
    grown = [receipt.private - start for receipt, start in zip(of_state, before, strict=True)]
    assert max(grown) <= size // 20
    kept = [end - start for end, start in zip(after, before, strict=True)]
    assert max(kept) <= size // RANKS + size // 20
    assert at_ranks(ranked, "bytes_held_in_store") == [0] * RANKS
    assert_equal(tensors_of(ranked.export_state("m")), tensors_of(state), atol=0)
    assert_equal(gradient_of(ranked), gradient, atol=0)


def test_what_reads_the_state_of_ranks_gets_the_state_before_the_next_step(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    state = single.export_state("m")
    ranked.add_model("m", None)
    ranked.import_state("m", state)

    take = ranked.begin_reading("m", lambda read: (read.step, tensors_of(read)))
    run(ranked, random_data([5, 2], seed=2))
    ranked.optim_step("m", ADAM)

    step, tensors = take()
    assert step == state.step
    assert_equal(tensors, tensors_of(state), atol=0)


def test_ranks_do_not_modify_shared_inputs(trainers: Trainers) -> None:
    ranked, single = trainers
    ranked.add_model("m", None)
    receipts: list[Receipt] = []

    ranked.import_state("m", single.export_state("m"))
    receipts += at_ranks(ranked, "last_receipt")
    ranked.import_gradient("m", gradient_of(single))
    receipts += at_ranks(ranked, "last_receipt")

    assert all(receipt.is_unchanged for receipt in receipts)


def test_merged_weights_are_assembled_one_at_a_time(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    gradient = gradient_of(single)
    ranked.add_model("m", None)

    ranked.import_gradient("m", gradient)

    most = at_ranks(ranked, "most_private_bytes")
    assert min(most)
    grown = [
        m - each.private for m, each in zip(most, at_ranks(ranked, "last_receipt"), strict=True)
    ]
    assert max(grown) <= sum(tensor.nbytes for tensor in gradient.values()) // 8


def test_replicated_tensors_are_sent_by_one_rank(trainer_of: TrainerOf) -> None:
    ranked = trainer_of(RANKS, MortalTrainer)
    ranked.add_model("m", LoraConfig(rank=4, seed=1))
    run(ranked, random_data([5, 9]))

    states = ranked.group.current.call_in_parts("share_state", "m")
    gradients = ranked.group.current.call_in_parts("share_gradient", "m")

    for shares in (states, gradients):
        assert [bool(parts) for _, parts in shares] == [True, False]


def test_ranks_keep_nothing_of_a_rejected_state(trainers: Trainers) -> None:
    ranked, single = trainers
    ranked.add_model("m", None)
    single.add_model("other", LoraConfig(rank=4, seed=1))

    with pytest.raises(InvalidRequest, match="checkpoint does not match this model"):
        ranked.import_state("m", single.export_state("other"))

    assert at_ranks(ranked, "bytes_held_in_store") == [0] * RANKS


def test_what_returns_is_private_and_leaves_nothing_in_the_stores_of_nodes(
    trainers: Trainers,
) -> None:
    ranked, _ = trainers
    ranked.add_model("m", None)
    before = objects_in_stores()

    state, weights = tensors_of(ranked.export_state("m")), ranked.copy_weights("m").tensors

    assert bytes_in_store([*state.values(), *weights.values()]) == 0
    assert objects_in_stores() <= before
    assert_equal(weights, {name: state[name] for name in weights}, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).view(3, 4),
        torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
        torch.arange(12)[3:7],
        torch.tensor(0.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
    ],
    ids=["float32", "transposed bfloat16", "a part", "a number", "booleans", "empty"],
)
def test_a_tensor_arrives_as_it_was_sent(cluster: None, tensor: torch.Tensor) -> None:
    arrived = ray.get(ray.put({"tensor": tensor}))["tensor"]

    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def test_views_of_one_tensor_take_no_additional_memory(cluster: None) -> None:
    whole = torch.arange(250_000, dtype=torch.float32)

    parts = ray.get(ray.put(list(whole.split(1000))))

    begin = min(part.data_ptr() for part in parts)
    end = max(part.data_ptr() + part.nbytes for part in parts)
    assert bytes_in_store(parts) == whole.nbytes
    assert end - begin <= 1.1 * whole.nbytes
