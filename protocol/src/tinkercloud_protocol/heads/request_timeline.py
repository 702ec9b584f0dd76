"""When the requests of a session were accepted, started and finished: what a head remembers of it.

A head answers `GET /timeline/<session id>` (`routes.HEAD_TIMELINE`) with these spans.
"""

from pydantic import BaseModel, ConfigDict


class Span(BaseModel):
    """One request. Times are seconds from 1970-01-01 in UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: str
    """The model or sampling session."""
    name: str
    """What was requested, such as `forward_backward` or `sample`."""
    request: str | None = None
    """The HTTP request, `request_ids`; None for one that another head had accepted."""
    accepted: float
    started: float
    """When it was its turn."""
    finished: float
    """When its result was there; of a save, when the state was captured."""
    tokens: int = 0
    """Tokens that were computed for it: trained, forward, of prompts without cached ones, sampled;
    0 from a head that does not count them."""
    paused: float = 0.0
    """Seconds, before it started, in which it waited for its owner: to retrieve results, or
    for tokens of `tokensPerMinute`; 0 from a head that does not measure them."""


class Timeline(BaseModel):
    """Spans of a session, in the order in which they finished."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    spans: list[Span]
