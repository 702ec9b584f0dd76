"""Which checkpoints of a run go if only the newest ones are kept."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkercloud_api.checkpoints.surplus_checkpoints import surplus_of
from tinkercloud_protocol.responses.listings import CheckpointInfo

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def time_of(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)


def saved(minute: int, kind: str = "weights", name: str | None = None, **rest: Any) -> Any:
    checkpoint_id = f"{kind}/{name or minute}"
    return CheckpointInfo(
        checkpoint_id=checkpoint_id,
        checkpoint_type=TYPES[kind],
        time=time_of(minute),
        tinker_path=f"tinker://s:train:0/{checkpoint_id}",
        size_bytes=1,
        **{"public": False, **rest},
    )


def gone(listed: list[CheckpointInfo], keep: int, until: datetime | None = None) -> list[str]:
    found = surplus_of(listed, keep, until, {})
    return [each.checkpoint_id for each in found.checkpoints]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(1, ["weights/1", "sampler_weights/2", "weights/3"]), (2, ["weights/1"]), (3, [])],
)
def test_the_newest_of_each_kind_stay(keep: int, expected: list[str]) -> None:
    sampler = "sampler_weights"
    listed = [saved(1), saved(2, sampler), saved(3), saved(4), saved(5, sampler)]

    assert gone(listed, keep) == expected


def test_what_others_may_use_and_what_cannot_be_read_stays_with_a_reason() -> None:
    listed = [
        saved(1, public=True),
        saved(2, damage="no such file"),
        saved(3),
        saved(4),
        saved(5),
        saved(6, damage="of a newer release"),
    ]

    found = surplus_of(listed, 1, None, {"tinker://s:train:0/weights/3": "a program uses it"})

    assert [each.checkpoint_id for each in found.checkpoints] == ["weights/4"]
    assert [(each.tinker_path[-1], each.reason) for each in found.spared] == [
        ("1", "everybody may read it"),
        ("2", "it can't be read"),
        ("3", "a program uses it"),
        ("6", "it can't be read"),
    ]


def test_automatic_checkpoints_are_neither_counted_nor_deleted() -> None:
    automatic = [saved(minute, name=f"autosave-step-00000{minute}") for minute in (1, 4)]

    assert gone([automatic[0], saved(2), saved(3), automatic[1]], 1) == ["weights/2"]


def test_what_was_saved_later_pushes_nothing_out() -> None:
    before = [saved(1), saved(2)]
    shown = surplus_of(before, 1, None, {})
    after = [*before, saved(3)]

    assert gone(after, 1) == ["weights/1", "weights/2"]
    assert gone(after, 1, shown.until) == ["weights/1"]
    assert gone(after[1:], 1, shown.until) == []


def test_a_run_without_checkpoints_loses_none() -> None:
    found = surplus_of([], 1, None, {})

    assert (found.checkpoints, found.spared, found.until) == ([], [], None)
