"""The text of some samples of the runs whose owners keep it.

A head adds them to the response of `routes.HEAD_LEASE`, one `SampleReport` a line. A report that is
repeated changes nothing; one that is lost loses text, and nothing of the run.
"""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_CHARACTERS = 2000
"""Characters of a prompt, and of an answer."""
SAMPLES_PER_STEP = 4
"""Samples of a run at each number of optimizer steps."""

_Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class KeptSample(BaseModel):
    """A prompt and the answer to it: of a request for several, the first one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    """Number of optimizer steps that the sampled weights had taken."""
    place: Annotated[int, Field(ge=0, lt=SAMPLES_PER_STEP)]
    """A later sample of the step replaces the one in its place."""
    at: datetime
    """When its request started."""
    owner: str
    """Who sampled."""
    prompt: _Text
    """The end of the prompt, with special tokens."""
    prompt_tokens_left_out: int
    """Number of tokens before it."""
    answer: _Text
    """The start of the answer, with special tokens."""
    answer_tokens_left_out: int
    """Number of tokens after it."""


class SampleReport(BaseModel):
    """Samples of a run that are newer than those of the previous report on the connection."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    samples_of: str
    """The run."""
    samples: list[KeptSample]
