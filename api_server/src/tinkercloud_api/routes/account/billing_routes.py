"""Usage as the SDK's `AdminClient` reads it. Nothing is charged: prices are absent.

Storage has no hourly ledger, so the events contain tokens only; the current storage is exact.
"""

from collections.abc import Iterator
from datetime import timedelta

from fastapi import APIRouter
from pydantic import AwareDatetime

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.usage.billing_rows import SessionHour
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.heads.reports.usage_reports import hour_of, start_of
from tinkercloud_protocol.responses.account_listings import (
    BillingEvent,
    BillingSession,
    BillingUsage,
    CheckpointStorage,
    CheckpointStorageList,
)
from tinkercloud_protocol.wire.errors import InvalidRequest

router = APIRouter(prefix="/api/v1/billing/usage", tags=["usage"])

_LONGEST = timedelta(days=14)
_MAX_ROWS = 20_000
_GIGABYTE = 1e9


@router.get("/events")
@names_no_object
async def show_events(
    server: Server, caller: Caller, starting_on: AwareDatetime, ending_before: AwareDatetime
) -> BillingUsage:
    """List the tokens of each hour, session and base model; admins see those of all owners."""
    for name, moment in (("starting_on", starting_on), ("ending_before", ending_before)):
        if start_of(hour_of(moment)) != moment:
            raise InvalidRequest(
                f"{name}: must be the start of an hour (UTC), got {moment.isoformat()}"
            )
    if not timedelta() < ending_before - starting_on <= _LONGEST:
        raise InvalidRequest(
            "ending_before: must be after starting_on, by at most 14 days, got"
            f" {ending_before - starting_on}"
        )
    rows = await server.billing.hours(
        caller.owner_filter("accessible"),
        hour_of(starting_on),
        hour_of(ending_before),
        limit=_MAX_ROWS + 1,
    )
    if len(rows) > _MAX_ROWS:
        raise InvalidRequest(
            f"starting_on, ending_before: the window has more than {_MAX_ROWS} hours of sessions;"
            " ask for a shorter one"
        )
    names = sorted({row.session_id for row in rows})
    sessions = {row.id: row for row in await server.catalog.sessions_named(names)}
    events: list[BillingEvent] = []
    for row in rows:
        session = sessions.get(row.session_id)
        project_id = session.project_id if session is not None else None
        events.extend(_events(row, project_id))
    return BillingUsage(
        data=events,
        sessions={
            name: BillingSession(user_metadata=session.user_metadata or None)
            for name, session in sessions.items()
        },
    )


def _events(row: SessionHour, project_id: str | None) -> Iterator[BillingEvent]:
    """Yield an event for each kind of tokens that were used, the most frequent first."""
    kinds: list[tuple[int, dict[str, object]]] = [
        (row.training_tokens, {"type": "training"}),
        (row.prefill_tokens, {"type": "sampling_prefill", "cached": False}),
        (row.cached_tokens, {"type": "sampling_prefill", "cached": True}),
        (row.sampled_tokens, {"type": "sampling_sample"}),
    ]
    for tokens, info in sorted(kinds, key=lambda kind: -kind[0]):
        if tokens:
            yield BillingEvent(
                bucket_start=start_of(row.hour),
                bucket_end=start_of(row.hour + 1),
                base_model=row.base_model,
                user_id=row.owner,
                user_name=row.owner,
                session_id=row.session_id,
                project_id=project_id,
                event_info={**info, "token_count": tokens},
            )


@router.get("/checkpoints/current")
async def show_storage(
    server: Server, caller: Caller, project_id: str | None = None
) -> CheckpointStorageList:
    """List what checkpoints occupy, by project and owner; admins see those of all owners."""
    owner = caller.owner_filter("accessible")
    if project_id is not None:
        await server.projects.require(project_id, caller)
        # Members see each other's checkpoints of the project anyway.
        owner = None
    # Reads the manifests of new checkpoints first.
    await server.checkpoints.page(caller.visible("accessible"), Page(0, 1))
    rows = await server.billing.storage(owner, project_id)
    return CheckpointStorageList(
        data=[
            CheckpointStorage(
                project_id=row.project_id,
                org_user_urn=row.owner,
                user_name=row.owner,
                checkpoint_count=row.checkpoints,
                size_bytes=row.size_bytes,
                size_gigabytes=row.size_bytes / _GIGABYTE,
            )
            for row in rows
        ]
    )
