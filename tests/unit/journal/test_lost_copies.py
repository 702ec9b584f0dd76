"""A copy that ranks made for a snapshot, and that is lost with their node, stops no training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tinkercloud_protocol.durability import DurabilityConfig
from tinkercloud_protocol.errors import Unavailable
from tinkercloud_testing.bare_heads import a_head, described, train, until
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.trainer import TrainingState

pytestmark = pytest.mark.timeout(120)


def lost() -> TrainingState:
    raise Unavailable("a node of the trainer's ranks was lost")


async def test_a_run_trains_on_without_a_snapshot_whose_copy_was_lost_and_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        expected = await train(head, 1, 8)

    config = DurabilityConfig(snapshot_steps=1)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        copy, copies = head.backend.trainer.begin_export, 0

        def lose_the_first(model_id: str) -> Callable[[], TrainingState]:
            nonlocal copies
            copies += 1
            return lost if copies == 1 else copy(model_id)

        monkeypatch.setattr(head.backend.trainer, "begin_export", lose_the_first)
        failures, taken = metrics.SNAPSHOT_FAILURES._value.get(), metrics.SNAPSHOTS._value.get()
        losses = await train(head, 1, 4)
        await until(lambda: metrics.SNAPSHOTS._value.get() > taken)
        assert metrics.SNAPSHOT_FAILURES._value.get() == failures + 1
        assert described(head).is_durable

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        losses += await train(head, 5, 8)
    assert losses == expected
