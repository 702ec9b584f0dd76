"""Several adapters in one product: each row gets only the delta of its own adapter."""

import gc

import pytest
import torch

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.segments import ActiveWeights
from tinkercloud_worker.torch_sampler.decode.lora_slots import LoraSlots, SlotAssignment

TARGETS = [
    Target("layers.0.mlp", in_features=6, out_features=5, group="mlp"),
    Target("layers.0.attn", in_features=6, out_features=4, group="attention"),
    Target("lm_head", in_features=6, out_features=9, group="unembed"),
]
ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def an_adapter(seed: int, rank: int, targets: list[Target] = TARGETS) -> ActiveWeights:
    """Return an adapter of random values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in targets:
        tensors[target.a_name] = torch.randn(rank, target.in_features, generator=generator)
        tensors[target.b_name] = torch.randn(target.out_features, rank, generator=generator)
    return ActiveWeights(tensors, 32.0 / rank)


def deltas(weights: ActiveWeights | None, target: Target) -> torch.Tensor:
    """Return the LoRA deltas of all rows."""
    if weights is None:
        return torch.zeros(len(ROWS), target.out_features)
    assert weights.lora_scale is not None
    middle = ROWS @ weights.tensors[target.a_name].T * weights.lora_scale
    return middle @ weights.tensors[target.b_name].T


def check_deltas(assignment: SlotAssignment | None, weights: list[ActiveWeights | None]) -> None:
    """Check that each row's delta equals that of its weights alone."""
    assert assignment is not None
    assert assignment.group is not None
    together = assignment.group.weights(
        torch.tensor(assignment.slots), assignment.used, assignment.scale
    )
    for target in TARGETS[:2]:
        expected = [deltas(each, target)[row] for row, each in enumerate(weights)]
        torch.testing.assert_close(deltas(together, target), torch.stack(expected))


def test_each_row_gets_the_delta_of_its_own_adapter_for_any_ranks() -> None:
    lora_slots = LoraSlots(TARGETS, torch.float32)
    small, large, third = an_adapter(1, rank=2), an_adapter(2, rank=8), an_adapter(3, rank=3)

    for weights in (
        [small] * 4,
        [small, None, None, small],
        [small, large, None, third],
        [third] * 4,
        [large, third, third, large],
    ):
        check_deltas(lora_slots.assign(weights), list(weights))


def test_a_reused_slot_keeps_nothing_of_its_previous_adapter() -> None:
    lora_slots = LoraSlots(TARGETS, torch.float32)
    large, small = an_adapter(1, rank=8), an_adapter(2, rank=2)

    lora_slots.assign([large] * 4)

    check_deltas(lora_slots.assign([small] * 4), [small] * 4)
    check_deltas(lora_slots.assign([small, None, small, None]), [small, None, small, None])


def test_a_step_is_the_same_for_another_version_of_an_adapter() -> None:
    lora_slots = LoraSlots(TARGETS, torch.float32)
    first = lora_slots.assign([an_adapter(1, rank=4)] * 4)

    generation = lora_slots.generation
    second = lora_slots.assign([an_adapter(2, rank=4)] * 4)

    assert first == second
    assert lora_slots.generation == generation


def test_a_freed_adapter_is_not_mistaken_for_a_new_one_at_its_address() -> None:
    lora_slots = LoraSlots(TARGETS, torch.float32)
    lora_slots.assign([an_adapter(1, rank=4)] * 4)
    gc.collect()
    others = [an_adapter(seed, rank=4) for seed in range(2, 12)]

    for other in others:
        check_deltas(lora_slots.assign([other] * 4), [other] * 4)


@pytest.mark.parametrize(
    "weights",
    [
        [an_adapter(1, rank=2), an_adapter(2, rank=2, targets=TARGETS[:1])],
        [an_adapter(1, rank=2), ActiveWeights({TARGETS[0].a_name: torch.full((1, 6), 1e30)}, 1.0)],
        [an_adapter(seed, rank=2) for seed in range(9)],
        [an_adapter(1, rank=2, targets=TARGETS[2:]), None],
    ],
    ids=["of other layers", "with values that overflow", "too many", "of the output alone"],
)
def test_adapters_that_cannot_share_a_batch_get_no_slots(
    weights: list[ActiveWeights | None],
) -> None:
    assert LoraSlots(TARGETS, torch.float32).assign(weights) is None
