"""The ledger of usage: what each head has reported, by hour, owner, session and model.

Rows have totals, keyed by the generation of the head, and never decrease. A report that is late or
repeated, or recorded by several servers, therefore changes nothing that is already known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, bindparam, func, null, select, tuple_, update
from sqlalchemy import Table as SqlTable
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import ApiKey, Session, UsageHour
from tinkercloud_api.config import api_metrics
from tinkercloud_protocol.heads.reports.usage_reports import UsageEntry, UsageReport

Grouping = Literal["hour", "day", "model", "project", "key"]
Values = dict[str, Any]

_KEY = (
    UsageHour.generation,
    UsageHour.hour,
    UsageHour.owner,
    UsageHour.session_id,
    UsageHour.model_id,
)
_AMOUNTS = (
    UsageHour.trained_tokens,
    UsageHour.forward_tokens,
    UsageHour.prefill_tokens,
    UsageHour.cached_tokens,
    UsageHour.sampled_tokens,
    UsageHour.engine_seconds,
)
_KEY_NAMES = tuple(column.key for column in _KEY)
_AMOUNT_NAMES = tuple(column.key for column in _AMOUNTS)
_TABLE = cast("SqlTable", UsageHour.__table__)


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which usage to sum up, and how."""

    by: Grouping
    owner: str | None
    """None means all owners."""
    since: int | None = None
    """First hour, as `UsageHour.hour`; None means the first one there is."""
    until: int | None = None
    """Hour after the last one."""


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """The sum of a group."""

    owner: str
    base_model: str
    model_id: str | None
    """None if the group includes all models; empty for the base model."""
    project_id: str | None
    """None if the group includes all projects, or sessions without one."""
    first_hour: int
    end_hour: int
    """The hour after the last one of the group."""
    amounts: dict[str, int | float]
    """By the names of the columns."""
    key_id: int | None = None
    """The key that created the sessions of the group; None if the group includes those of all keys,
    or sessions whose key is not known."""
    key_name: str | None = None


class UsageLedger(Statements):
    """Records reports of heads, and sums them up."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create a ledger in a catalog's database."""
        super().__init__(engine)
        self._ensure = self._insert_into(UsageHour).on_conflict_do_nothing()

    async def record(self, report: UsageReport) -> None:
        """Record a report. It may be repeated, and late.

        Raises:
            Unavailable: the database does not respond; the report was not recorded.
        """
        reported = {_key(report, entry): entry for entry in report.entries}
        if not reported:
            return
        grown: list[Values] = []
        async with self._writing() as db:
            # All replicas create and lock rows in the same order to prevent deadlocks.
            empty = {**dict.fromkeys(_AMOUNT_NAMES, 0), "base_model": report.base_model}
            keys = sorted(reported)
            rows = [dict(zip(_KEY_NAMES, key, strict=True)) | empty for key in keys]
            await db.execute(self._ensure, rows)
            known = await _locked(db, keys)
            for key in keys:
                amounts = reported[key].model_dump(include=set(_AMOUNT_NAMES))
                larger = {name: max(amounts[name], known[key][name]) for name in _AMOUNT_NAMES}
                if larger != known[key]:
                    grown.append(
                        larger | {f"key_{n}": v for n, v in zip(_KEY_NAMES, key, strict=True)}
                    )
            if grown:
                connection = await db.connection()
                await connection.execute(_SET, grown)
        for values in grown:
            key = tuple(values[f"key_{name}"] for name in _KEY_NAMES)
            growth = {name: values[name] - known[key][name] for name in _AMOUNT_NAMES}
            api_metrics.count_usage(values["key_owner"], growth)

    async def totals(self, query: UsageQuery, page: Page | None = None) -> Sequence[UsageTotal]:
        """Return sums, the latest first; page None means all."""
        group = (UsageHour.owner, UsageHour.base_model, _third(query.by))
        first, last = func.min(UsageHour.hour), func.max(UsageHour.hour)
        sums = [func.sum(column).label(column.key) for column in _AMOUNTS]
        key_name = func.min(ApiKey.name) if query.by == "key" else null()
        selected = select(*group, key_name, first, last, *sums).group_by(*group)
        if query.by in {"project", "key"}:
            selected = selected.join(Session, Session.id == UsageHour.session_id, isouter=True)
        if query.by == "key":
            selected = selected.join(ApiKey, ApiKey.id == Session.key_id, isouter=True)
        if query.owner is not None:
            selected = selected.where(UsageHour.owner == query.owner)
        if query.since is not None:
            selected = selected.where(UsageHour.hour >= query.since)
        if query.until is not None:
            selected = selected.where(UsageHour.hour < query.until)
        ordered = selected.order_by(last.desc(), *group)
        if page is not None:
            ordered = ordered.offset(page.offset).limit(page.limit)
        async with self._reading() as db:
            rows = (await db.execute(ordered)).all()
        return [_total(query.by, tuple(row)) for row in rows]


_SET = (
    update(_TABLE)
    .where(*(column == bindparam(f"key_{column.key}") for column in _KEY))
    .values({name: bindparam(name) for name in _AMOUNT_NAMES})
)


async def _locked(db: AsyncSession, keys: Sequence[tuple[Any, ...]]) -> dict[Any, Values]:
    """Lock rows and return their amounts by key."""
    query = select(*_KEY, *_AMOUNTS).where(tuple_(*_KEY).in_(keys)).order_by(*_KEY)
    rows = await db.execute(query.with_for_update())
    return {
        tuple(row[: len(_KEY)]): dict(zip(_AMOUNT_NAMES, row[len(_KEY) :], strict=True))
        for row in rows.all()
    }


def _key(report: UsageReport, entry: UsageEntry) -> tuple[Any, ...]:
    return (report.generation, entry.hour, entry.owner, entry.session_id, entry.model_id)


def _third(by: Grouping) -> ColumnElement[Any]:
    """Return what groups usage, in addition to the owner and the base model."""
    match by:
        case "model":
            return UsageHour.model_id.expression
        case "project":
            return Session.project_id.expression
        case "key":
            return Session.key_id.expression
        case "day":
            return UsageHour.hour - UsageHour.hour % 24
        case "hour":
            return UsageHour.hour.expression


def _total(by: Grouping, row: tuple[Any, ...]) -> UsageTotal:
    """Return the sum of a group.

    Args:
        by: what else than owner and base model it is grouped by.
        row: these three, the name of the key, the first and the last hour, and the sums.
    """
    owner, base_model, third, key_name, first, last, *sums = row
    model_id = third if by == "model" else None
    project_id = third if by == "project" else None
    if by in {"hour", "day"}:
        first, last = third, third + (23 if by == "day" else 0)
    amounts: dict[str, int | float] = {
        name: float(total) if name == "engine_seconds" else int(total)
        for name, total in zip(_AMOUNT_NAMES, sums, strict=True)
    }
    return UsageTotal(
        owner,
        base_model,
        model_id,
        project_id,
        first,
        last + 1,
        amounts,
        key_id=third if by == "key" else None,
        key_name=key_name,
    )
