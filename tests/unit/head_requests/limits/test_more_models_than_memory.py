"""A head serves more models than its trainer has memory for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import Head, a_head
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.training.paging import DiskFiles

pytestmark = pytest.mark.timeout(300)

NUM_MODELS, NUM_STEPS = 4, 3


async def losses_in_turn(models: Sequence[Head]) -> list[list[float]]:
    """Create all models, and train each a step after the other; return the losses of each."""
    for model in models:
        await model.begin()
        await model.answer(0)
    losses: list[list[float]] = [[] for _ in models]
    for step in range(NUM_STEPS):
        for index, model in enumerate(models):
            model.add(2 * step + 1, first=5 + index)
            model.apply(2 * step + 2)
            losses[index].append(await model.loss(2 * step + 1))
    return losses


def models_of(head: Head) -> list[Head]:
    return [replace(head, model=ModelId("s", index)) for index in range(NUM_MODELS)]


async def test_models_that_take_turns_in_the_memory_of_two_have_the_same_losses(
    tmp_path: Path,
) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "large") as large:
        expected = await losses_in_turn(models_of(large))
        sizes = [each.model_bytes for each in large.service.held()]

    in_memory: list[Head] = []

    def available() -> int:
        used = sum(each.model_bytes for head in in_memory for each in head.service.held())
        return 5 * sizes[0] // 2 + KEPT_FREE_BYTES - used

    place = DiskFiles(tmp_path / "idle", 1 << 30)
    with a_head(root, tmp_path, "small", available=available, place=place) as small:
        in_memory.append(small)
        losses = await losses_in_turn(models_of(small))
        held = [each.model_bytes for each in small.service.held()]

        status = small.service.status()

    assert HeadStatus.model_validate_json(status.model_dump_json()) == status
    assert status.capacity is not None
    assert status.capacity.models <= 2
    assert losses == expected
    assert len(held) == NUM_MODELS
    assert held.count(0) >= NUM_MODELS - 2
