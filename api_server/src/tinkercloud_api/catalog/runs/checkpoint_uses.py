"""What refers to the checkpoints of a run."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, select

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.program_rows import RUNNING
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import (
    STORED,
    Program,
    SamplingSession,
    Session,
    TrainingRun,
    Upload,
)
from tinkercloud_protocol.wire.paths import SCHEME

_NAMED = 3
"""How many of the sessions that sample from a checkpoint are named."""


class CheckpointUses(Statements):
    """Finds what refers to checkpoints, of all owners."""

    async def uses_of_checkpoints(self, run_id: str, visible: Visibility) -> dict[str, str]:
        """Return which checkpoints of a run are referred to: by path, what refers to one.

        Args:
            run_id: the run.
            visible: which sessions are named.
        """
        start = f"{SCHEME}{run_id}/"
        found: dict[str, str] = {}
        sessions = defaultdict[str, list[str]](list)
        async with self._reading() as db:
            for what, query in _references(start).items():
                found.update(dict.fromkeys(await db.scalars(query), what))
            for path, session, is_visible in await db.execute(_sampled(start, visible)):
                sessions[path] += [session] if is_visible else []
        return found | {path: _of_sessions(named) for path, named in sessions.items()}


def _of_sessions(named: Sequence[str]) -> str:
    """Return the reason why a checkpoint stays from which sessions sample."""
    what = "a session that has not ended samples from it"
    if not named:
        return what
    others = f" and {len(named) - _NAMED} others" if len(named) > _NAMED else ""
    ids = ", ".join(named[:_NAMED]) + others
    return f"{what}: {ids}; `tinkercloud sessions delete ID` ends it"


def _sampled(start: str, visible: Visibility) -> Select[Any, str, bool]:
    """Return the query of the paths with a start, and the sessions that sample from them."""
    path = SamplingSession.model_path
    return (
        select(path, Session.id, visible.of(Session))
        .join(Session, Session.id == SamplingSession.session_id)
        .where(Session.finished_at.is_(None), path.startswith(start, autoescape=True))
        .distinct()
        .order_by(Session.id)
    )


def _references(start: str) -> dict[str, Select[Any]]:
    """Return the queries of the paths with a start that something refers to, by what that is."""

    def paths(column: ColumnElement[Any], condition: ColumnElement[bool]) -> Select[Any]:
        return select(column).where(condition, column.startswith(start, autoescape=True)).distinct()

    has_model = TrainingRun.generation.is_distinct_from(STORED)
    is_running = Program.phase.in_(RUNNING)
    return {
        "a copy of it is being made": paths(
            Upload.manifest["copied_from"].as_string(), Upload.is_finished.is_(False)
        ),
        "a run that has not ended started from it": paths(
            TrainingRun.spec["restore_from"].as_string(),
            and_(TrainingRun.deleted_at.is_(None), has_model),
        ),
        "a program that has not ended resumes from it": paths(
            Program.progress["checkpoint"].as_string(), is_running
        ),
        "a program that has not ended has named it": paths(
            Program.progress["sampler"].as_string(), is_running
        ),
    }
