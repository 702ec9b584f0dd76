"""What the losses that clients upload may take."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class LossLimits(BaseModel):
    """Upper bounds of uploaded losses, which are computed in processes of their own."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    max_loss_processes: Annotated[int, Field(ge=1)] = 4
    """Maximum number of processes that compute uploaded losses. Each belongs to one owner, whose
    losses it computes one after another; further owners take turns."""
    max_loss_bytes: Annotated[int, Field(ge=1 << 26)] = 1 << 30
    """Maximum memory of such a process in bytes, in addition to what it takes when it has started.
    The tensors that a loss has at the same time may take half of it."""
    max_loss_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Maximum time, in seconds, that the uploaded loss of one request may take."""
    max_loss_cpu_seconds: Annotated[float, Field(ge=1)] = 60.0
    """Maximum CPU time, in seconds, that the uploaded loss of one request may take."""
