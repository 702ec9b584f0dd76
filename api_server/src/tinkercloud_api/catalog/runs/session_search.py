"""The query that finds sessions by their name, metadata, project and state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.search_terms import found_sessions
from tinkercloud_api.catalog.schema.tables import EXPIRED, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A state of a session, as clients search for it."""

    type: str
    reasons: Sequence[str] | None = None
    """Reasons that clients stated when they ended the session; None means any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the sessions have in common. None means any."""

    visible: Visibility
    owners: Sequence[str] | None = None
    session_id: str | None = None
    display_name: str | None = None
    """Words that the display name contains; a session matches by this or by `session_id`."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    project_ids: Sequence[str] | None = None
    statuses: Sequence[Status] | None = None
    live_since: datetime
    """A session without an end is active if its last heartbeat is not older."""
    after: tuple[datetime, str] | None = None
    """Creation time and id of the last session of the previous page."""
    text: str = ""
    """Words with which words of the id, owner, name, project or metadata begin, in any case."""


def matching(search: Search) -> Select[Session]:
    """Return the query for the sessions that match, newest first."""
    query = select(Session).order_by(Session.created_at.desc(), Session.id.desc())
    conditions: list[ColumnElement[bool]] = [search.visible.of(Session)]
    conditions += [
        Session.user_metadata[key].as_string() == value
        for key, value in search.user_metadata.items()
    ]
    if search.owners is not None:
        conditions.append(Session.owner.in_(search.owners))
    if search.project_ids is not None:
        conditions.append(Session.project_id.in_(search.project_ids))
    if search.text:
        conditions.append(found_sessions(search.text))
    if names := _named(search):
        conditions.append(or_(*names))
    if search.statuses is not None:
        conditions.append(or_(*(_has(status, search) for status in search.statuses)))
    if search.after is not None:
        created_at, session_id = search.after
        same_time = and_(Session.created_at == created_at, Session.id < session_id)
        conditions.append(or_(Session.created_at < created_at, same_time))
    return query.where(*conditions)


def matching_ids(search: Search) -> Select[str]:
    """Return the query for the ids of the sessions that match, in no order."""
    return matching(search).with_only_columns(Session.id).order_by(None)


def _named(search: Search) -> list[ColumnElement[bool]]:
    """Return the conditions of which a session must meet one."""
    conditions: list[ColumnElement[bool]] = []
    if search.session_id is not None:
        conditions.append(Session.id == search.session_id)
    if search.display_name is not None:
        name = func.lower(Session.display_name)
        words = search.display_name.lower().split()
        conditions.append(and_(*(name.contains(word, autoescape=True) for word in words)))
    return conditions


def _has(status: Status, search: Search) -> ColumnElement[bool]:
    """Return the condition for a state. No session fails as a whole here."""
    if status.type == "active":
        is_live = Session.last_heartbeat_at >= search.live_since
        return and_(Session.finished_at.is_(None), is_live)
    if status.type == "silent":
        is_silent = Session.last_heartbeat_at < search.live_since
        return and_(Session.finished_at.is_(None), is_silent)
    if status.type == "ended":
        return Session.finished_at.is_not(None)
    if status.type == "cancelled":
        return Session.finish_reason == EXPIRED
    if status.type == "client_finished":
        ended = and_(Session.finished_at.is_not(None), Session.finish_reason != EXPIRED)
        return ended if status.reasons is None else Session.finish_reason.in_(status.reasons)
    return false()
