"""How the number of a head's engines follows its load.

The operator creates and removes engines; the head knows the load, and which engines it uses. The
operator sends the head the number of engines that exist. The head answers with the number that it
needs: immediately if it needs more; if fewer, only after the surplus engines have no request left.
The head uses an engine again only after the operator has counted it in a later request.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class EngineScaling(BaseModel):
    """How the number of engines follows the load."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    min_engines: Annotated[int, Field(ge=1)] = 1
    """Minimum number of engines, and the number that a head starts with. The maximum is the number
    of URLs."""
    target_samples: Annotated[int, Field(ge=1)] = 64
    """Number of samples in progress, waiting ones included, per engine."""
    up_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How long, in seconds, the load must need more engines."""
    down_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long, in seconds, fewer engines must suffice."""


class Engines(BaseModel):
    """A number of engines: those that exist, in a request; those that are needed, in an answer."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    engines: Annotated[int, Field(ge=1, le=4096)]


HOLD_SECONDS = 30.0
"""How long, in seconds, a head holds a request while the number that it needs does not change."""
