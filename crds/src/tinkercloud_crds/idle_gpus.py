"""How many GPUs of a BaseModel's pods are idle, and the hours of that, in its status."""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field

from tinkercloud_crds.conditions import timestamp
from tinkercloud_crds.structural import Part
from tinkercloud_crds.times import parse_time

MONTHS = 13
"""Number of months that are kept: a year, and the same month of the year before."""

Hours = Annotated[float, Field(ge=0)]


class IdleGpus(Part):
    """GPUs that no request has used for five minutes, although their pods are ready."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that are idle: those of sessions, clusters of the pool and warm spares whose
    `idleSince` is set."""
    since: Annotated[str, Field(max_length=40)] = ""
    """Until when hours are counted (RFC 3339); empty before there were any idle GPUs."""
    gpu_hours: Hours = 0.0
    """Hours that GPUs have been idle, summed over GPUs, until `since`."""
    gpu_hours_by_month: Annotated[dict[str, Hours], Field(default_factory=dict, max_length=MONTHS)]
    """The same for each of the last months with any, such as `2026-11` (UTC)."""

    def at(self, moment: datetime) -> "IdleGpus":
        """Return the counts until a moment (UTC) up to which `gpus` has not changed.

        A moment before `since` counts as `since`: clocks differ, and may be set back.
        """
        start = parse_time(self.since)
        moment = moment.replace(microsecond=0)
        moment = max(moment, start) if start is not None else moment
        total, months = self.gpu_hours, dict(self.gpu_hours_by_month)
        while self.gpus and start is not None and start < moment:
            end = min(_next_month(start), moment)
            hours = self.gpus * (end - start).total_seconds() / 3600
            month = f"{start:%Y-%m}"
            months[month] = months.get(month, 0.0) + hours
            total, start = total + hours, end
        latest = sorted(months.items())[-MONTHS:]
        return self.model_copy(
            update={
                "since": timestamp(moment),
                "gpu_hours": round(total, 4),
                "gpu_hours_by_month": {month: round(hours, 4) for month, hours in latest},
            }
        )


def _next_month(moment: datetime) -> datetime:
    first = moment.replace(day=1, hour=0, minute=0, second=0)
    return (first + timedelta(days=32)).replace(day=1)
