"""A copy that ranks made for a snapshot, and that is lost with their node, stops no training."""

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.serving.bare_heads import Head, a_head, described, train, until
from tinkercloud_testing.serving.metrics import metric_value
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.trainer import TrainingState

pytestmark = pytest.mark.timeout(120)


def lost() -> TrainingState:
    raise Unavailable("a node of the trainer's ranks was lost")


def lose_the_first(patch: pytest.MonkeyPatch, head: Head, method: str) -> None:
    """Let the first copy that this method of the trainer begins be lost."""
    copy, copies = getattr(head.backend.trainer, method), 0

    def begin(model_id: str) -> Callable[[], object]:
        nonlocal copies
        copies += 1
        # The trainer makes the copy all the same.
        take: Callable[[], object] = copy(model_id)
        return lost if copies == 1 else take

    patch.setattr(head.backend.trainer, method, begin)


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
        lose_the_first(monkeypatch, head, "begin_export")
        failures, taken = metric_value(metrics.SNAPSHOT_FAILURES), metric_value(metrics.SNAPSHOTS)
        losses = await train(head, 1, 4)
        await until(lambda: metric_value(metrics.SNAPSHOTS) > taken)
        assert metric_value(metrics.SNAPSHOT_FAILURES) == failures + 1
        assert described(head).is_durable

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        losses += await train(head, 5, 8)
    assert losses == expected


@pytest.mark.parametrize(
    ("method", "route", "fields"),
    [
        ("begin_export", routes.SAVE_WEIGHTS, {"path": "saved"}),
        ("publication", routes.SAVE_WEIGHTS_FOR_SAMPLER, {"sampling_session_seq_id": 0}),
    ],
    ids=["state", "sampler"],
)
async def test_a_save_whose_copy_was_lost_makes_another_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    route: str,
    fields: dict[str, object],
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1, 2)
        lose_the_first(monkeypatch, head, method)
        head.send(route, 3, **fields)

        answer = orjson.loads(await head.answer(3))

        assert answer.keys() & {"path", "sampling_session_id"}, answer
