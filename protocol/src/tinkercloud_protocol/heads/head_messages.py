"""Small requests to heads, and their responses."""

from collections.abc import Sequence
from typing import Annotated, Literal

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


class RecordedSessionsOf(_Message):
    """POST /recorded_sessions: whose recorded sessions to list."""

    owner: str


class RecordedSession(_Message, extra="ignore"):
    """A recorded session, as clients of the OpenAI endpoints see it."""

    id: str
    object: Literal["recorded_session"] = "recorded_session"
    model: str
    """The name that it was created with, which its turns must have."""
    num_turns: int
    num_tokens: int
    """Tokens of the prompts and answers of all turns."""
    created: int
    """Seconds since 1970-01-01 in UTC."""
    expires: int
    """When it is deleted if it is not used until then, in the same seconds."""


class RecordedSessionList(_Message, extra="ignore"):
    """Response to POST /recorded_sessions."""

    object: Literal["list"] = "list"
    data: Sequence[RecordedSession]


class SaveModel(_Message):
    """POST /save_model/<model id>: write a checkpoint of the state after the last optim_step."""

    name: str | None = None
    """Name of the checkpoint, which must be new; None means one with the number of the step."""


class ModelSaved(_Message, extra="ignore"):
    """Response to POST /save_model/<model id>."""

    tinker_path: str
    step: int
    """Number of optimizer steps that the state has."""


class SampledRuns(_Message):
    """PUT /sampled_runs: all runs whose owners keep the text of some samples."""

    runs: Sequence[str]


class ModelSuspended(_Message, extra="ignore"):
    """Response to POST /suspend_model/<model id>."""

    is_suspended: bool
    """False if the model is in use, unknown, or cannot be written now."""
