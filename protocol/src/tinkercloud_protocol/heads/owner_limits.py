"""The limits of an owner that a session head applies; a header of the API server's requests."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TOKENS_PER_MINUTE = "limits.tokensPerMinute"
"""Name of the limit of tokens in the reasons of heads why requests wait."""


class OwnerLimits(BaseModel):
    """The current limits of an owner. They are sent with each request, so a change needs no call.

    Unknown fields are ignored: a later API server may send more.
    """

    model_config = ConfigDict(frozen=True)

    owner: str
    tenant: str | None = None
    """Name of the owner's tenant; None without one."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """None means no limit."""
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Share of the computation that waits; None to leave it as configured."""
