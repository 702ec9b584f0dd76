"""The query that finds runs by what people remember of them."""

import json
from collections.abc import Set
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, String, and_, cast, or_, select

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.schema.tables import STORED, Project, Session, TrainingRun


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
    """What the id, owner, base model, name, project or metadata of a run contains, in any case."""
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
        query = query.where(_contains(search.text))
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


def session_contains(text: str) -> ColumnElement[bool]:
    """Return the condition for sessions whose name, metadata, tags or project has a text."""
    projects = select(Project.id).where(
        or_(*(column.icontains(text, autoescape=True) for column in (Project.id, Project.name)))
    )
    return or_(
        Session.display_name.icontains(text, autoescape=True),
        _json_contains(cast(Session.user_metadata, String), text),
        _json_contains(cast(Session.tags, String), text),
        Session.project_id.in_(projects),
    )


def _contains(text: str) -> ColumnElement[bool]:
    sessions = select(Session.id).where(session_contains(text))
    columns = (TrainingRun.id, TrainingRun.owner, TrainingRun.base_model)
    return or_(
        *(column.icontains(text, autoescape=True) for column in columns),
        _json_contains(cast(TrainingRun.user_metadata, String), text),
        TrainingRun.session_id.in_(sessions),
    )


def _json_contains(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    """Return whether JSON has a text; databases keep it with escapes, also of the other case."""
    forms = {json.dumps(each)[1:-1] for each in (text, text.lower(), text.upper())}
    contains = or_(*(column.icontains(each, autoescape=True) for each in sorted(forms)))
    return and_(column.not_in(("null", "{}", "[]")), contains)
