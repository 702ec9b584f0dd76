"""What heads report to API servers about their usage.

A head writes reports to the response of `routes.HEAD_LEASE`, one JSON object a line, among those of
other kinds (`durability.DurabilityReport`).
"""

from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, ConfigDict

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def hour_of(moment: datetime) -> int:
    """Return the hour that includes a time, as hours from 1970-01-01 in UTC."""
    return (moment - _EPOCH) // timedelta(hours=1)


def hour_after(moment: datetime) -> int:
    """Return the first hour that does not start before a time."""
    return -((_EPOCH - moment) // timedelta(hours=1))


def start_of(hour: int) -> datetime:
    """Return the start of an hour."""
    return _EPOCH + timedelta(hours=hour)


class UsageEntry(BaseModel):
    """What an owner has used of a head in an hour, for one session and model.

    The amounts are totals of the hour, which only grow while the head runs.
    """

    # Heads of later releases may report more.
    model_config = ConfigDict(frozen=True, extra="ignore")

    hour: int
    """Hours from 1970-01-01 in UTC to the start of the hour."""
    owner: str
    session_id: str
    """The SDK session that sent the requests."""
    model_id: str
    """The trained or sampled model; for a checkpoint, its run. Empty for the base model."""
    trained_tokens: int = 0
    forward_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    engine_seconds: float = 0.0


class UsageReport(BaseModel):
    """Entries that have changed since the previous report; the first report has all."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    generation: str
    """Generation of the head."""
    base_model: str
    entries: list[UsageEntry]
