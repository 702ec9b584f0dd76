"""The query that finds runs by what people remember of them."""

from collections.abc import Set
from dataclasses import dataclass

from sqlalchemy import Select, or_, select

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.search_terms import found_runs
from tinkercloud_api.catalog.schema.tables import STORED, TrainingRun


@dataclass(frozen=True, slots=True)
class Heads:
    """The running heads that a server uses."""

    generations: Set[str]
    """Generations of the shared heads."""
    runs: Set[str]
    """Ids of runs that have a place on a head, or get one now."""


@dataclass(frozen=True, slots=True)
class RunSearch:
    """What the runs have in common."""

    visible: Visibility
    text: str = ""
    """Words with which words of the id, owner, base model, name, project or metadata begin."""
    has_ended: bool | None = None
    """Whether they have ended; None for all."""
    heads: Heads | None = None
    """Those that these heads may have or create; None for all."""
    session_ids: Select[str] | None = None
    """The query for the ids of the sessions to which they belong; None for all."""


def runs_that_match(search: RunSearch) -> Select[TrainingRun]:
    """Return the query for runs that had a model: the last used first, and deleted ones last."""
    is_deleted = TrainingRun.deleted_at.is_not(None)
    query = select(TrainingRun).where(
        search.visible.of(TrainingRun), TrainingRun.generation.is_distinct_from(STORED)
    )
    if search.text:
        query = query.where(found_runs(search.text))
    if search.has_ended is not None:
        query = query.where(is_deleted if search.has_ended else ~is_deleted)
    if search.session_ids is not None:
        query = query.where(TrainingRun.session_id.in_(search.session_ids))
    if search.heads is not None:
        of_heads = (
            TrainingRun.generation.is_(None),
            TrainingRun.generation.in_(search.heads.generations),
            TrainingRun.id.in_(search.heads.runs),
        )
        query = query.where(or_(*of_heads))
    return query.order_by(is_deleted, TrainingRun.last_request_at.desc(), TrainingRun.id)
