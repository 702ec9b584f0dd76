"""What refers to the checkpoints of a run."""

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, select

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


class CheckpointUses(Statements):
    """Finds what refers to checkpoints, of all owners."""

    async def uses_of_checkpoints(self, run_id: str) -> dict[str, str]:
        """Return which checkpoints of a run are referred to: by path, what refers to one."""
        found: dict[str, str] = {}
        async with self._reading() as db:
            for what, query in _references(f"{SCHEME}{run_id}/").items():
                found.update(dict.fromkeys(await db.scalars(query), what))
        return found


def _references(start: str) -> dict[str, Select[Any]]:
    """Return the queries of the paths with a start that something refers to, by what that is."""

    def paths(column: ColumnElement[Any], condition: ColumnElement[bool]) -> Select[Any]:
        return select(column).where(condition, column.startswith(start, autoescape=True)).distinct()

    sampled = paths(SamplingSession.model_path.expression, Session.finished_at.is_(None))
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
        "a session that has not ended samples from it": sampled.join(
            Session, Session.id == SamplingSession.session_id
        ),
    }
