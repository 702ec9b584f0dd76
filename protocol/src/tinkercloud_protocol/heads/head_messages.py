"""Small requests to heads, and their responses."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _Message(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class ForgetResults(_Message):
    """POST /forget_results: which results to drop."""

    owner: str
    min_age_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Drop only results that were read at least this long ago."""


class Forgotten(_Message, extra="ignore"):
    """Response to POST /forget_results."""

    num_results: int


class SaveModel(_Message):
    """POST /save_model/<model id>: write a checkpoint of the state after the last optim_step."""

    name: str | None = None
    """Name of the checkpoint, which must be new; None means one with the number of the step."""


class ModelSaved(_Message, extra="ignore"):
    """Response to POST /save_model/<model id>."""

    tinker_path: str
    step: int
    """Number of optimizer steps that the state has."""


class ModelSuspended(_Message, extra="ignore"):
    """Response to POST /suspend_model/<model id>."""

    is_suspended: bool
    """False if the model is in use, unknown, or cannot be written now."""
