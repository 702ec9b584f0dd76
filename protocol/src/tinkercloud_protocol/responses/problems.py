"""Responses about what needs somebody's attention (no SDK calls)."""

from datetime import datetime
from typing import Literal

from tinkercloud_protocol.responses.listings import Answer

ProblemKind = Literal["store", "model", "run", "quota"]


class Problem(Answer):
    """Something that fails, waits or is at its limit."""

    kind: ProblemKind
    subject: str
    """The base model, run or limit; `checkpoint store` for the store."""
    owner: str | None = None
    """Owner of the run or quota; None if it concerns everybody."""
    reason: str
    remedy: str
    last_used_at: datetime | None = None
    """Time of the run's last request."""


class ProblemList(Answer):
    """GET problems: those of everybody first, then those of runs, the last used first."""

    problems: list[Problem]
