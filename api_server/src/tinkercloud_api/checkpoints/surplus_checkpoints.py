"""Which checkpoints of a run go if only the newest ones are kept."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from tinkercloud_protocol.responses.listings import (
    CheckpointInfo,
    SparedCheckpoint,
    SurplusCheckpoints,
)
from tinkercloud_protocol.wire.paths import CheckpointPath


def surplus_of(
    listed: Sequence[CheckpointInfo], keep: int, until: datetime | None, uses: Mapping[str, str]
) -> SurplusCheckpoints:
    """Return which checkpoints of a run go, and which older ones stay.

    The newest ones of each kind stay. Damaged ones are not counted, and stay, like those that
    everybody may read and those that something refers to. Automatic ones belong to the head.

    Args:
        listed: the checkpoints of the run, oldest first.
        keep: how many of each kind stay, at least 1.
        until: those that were saved later are neither counted nor deleted; None for no such time.
        uses: what refers to checkpoints, by path.
    """
    counted = [
        each
        for each in listed
        if (until is None or each.time <= until)
        and not CheckpointPath.parse(each.tinker_path).is_autosave
    ]
    newer, older = Counter[str](), list[CheckpointInfo]()
    for each in reversed(counted):
        newer[each.checkpoint_type] += each.damage is None
        if each.damage is not None or newer[each.checkpoint_type] > keep:
            older.append(each)
    reasons = {each.tinker_path: _why_spared(each, uses) for each in older}
    older.reverse()
    return SurplusCheckpoints(
        checkpoints=[each for each in older if reasons[each.tinker_path] is None],
        spared=[
            SparedCheckpoint(tinker_path=path, reason=reason)
            for path, reason in reversed(reasons.items())
            if reason is not None
        ],
        until=counted[-1].time if counted else None,
    )


def _why_spared(checkpoint: CheckpointInfo, uses: Mapping[str, str]) -> str | None:
    if checkpoint.damage is not None:
        return "it can't be read"
    if checkpoint.public:
        return "everybody may read it"
    return uses.get(checkpoint.tinker_path)
