"""The latest checkpoint of a run does not depend on the clock."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.head.model import model_checkpoints


class Clock(datetime):
    """A clock that can be set."""

    moment = datetime(2026, 1, 2, tzinfo=UTC)

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        """Return the time it was set to."""
        return cls.moment


async def saved(head: Head, seq_id: int, name: str) -> CheckpointManifest:
    """Save a checkpoint; return its manifest."""
    head.send(routes.SAVE_WEIGHTS, seq_id, path=name, ttl_seconds=3600)
    await head.answer(seq_id)
    path = CheckpointPath(str(MODEL), CheckpointKind.TRAINING, name)
    return await head.backend.store.manifest(path)


async def test_checkpoints_are_in_order_even_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = (tmp_path / "store").as_uri()
    monkeypatch.setattr(model_checkpoints, "datetime", Clock)
    moments = []
    with a_head(root, tmp_path / "1", "g1") as first:
        await first.begin()
        moments.append((await saved(first, 1, "before")).created_at)
        monkeypatch.setattr(Clock, "moment", Clock.moment - timedelta(days=1))
        last = await saved(first, 2, "after")
        moments.append(last.created_at)
        await first.service.suspend()

    with a_head(root, tmp_path / "2", "g2") as second:
        await second.resume("g1")
        moments.append((await saved(second, 3, "resumed")).created_at)

    assert moments == sorted(set(moments))
    assert last.expires_at == Clock.moment + timedelta(hours=1)
