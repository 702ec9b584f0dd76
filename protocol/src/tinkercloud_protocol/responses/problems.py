"""Responses about what needs somebody's attention (no SDK calls)."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from tinkercloud_protocol.responses.listings import Answer

ProblemKind = Literal["store", "disk", "model", "pool", "session", "run", "program", "quota"]
"""What fails. `pool` and `session` are TrainingSessions on Kubernetes: a cluster that sessions
share, and any other."""


class Problem(Answer):
    """Something that fails, waits or is at its limit."""

    kind: ProblemKind
    subject: str
    """The base model, session, run, program, folder or limit; `checkpoint store` for the store."""
    owner: str | None = None
    """Owner of the session, run or program, whom a quota limits, or of a tenant's quota who asks;
    None otherwise."""
    run_id: str | None = None
    """The run that it is about, or whose session or program it is; None if there is none."""
    reason: str
    cause: str = Field(default="", exclude=True)
    """Which of several problems of the subject it is; not in the response."""
    remedy: str
    since: datetime | None = None
    """When it began, or when somebody first asked and it was there; lists always have it."""
    last_used_at: datetime | None = None
    """Time of the run's last request."""


class ProblemList(Answer):
    """GET problems: the newest first."""

    problems: list[Problem]
