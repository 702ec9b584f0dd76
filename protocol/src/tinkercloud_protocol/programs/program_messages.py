"""Programs that the server runs for an owner: what is sent, listed and reported.

A program is an ordinary client of this server that runs next to it instead of on a laptop: as a
child process of a local server, or as a Job next to a TrainingSession. It has an API key of its
own, which is valid until the program ends, and finds everything that it needs in its environment.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_protocol.wire.json_model import Items, Name, Storable, Uri, WireModel

PROGRAM_ID = "TINKERCLOUD_PROGRAM_ID"
"""Environment variable with the id under which a program reports its progress."""
MODEL_ID = "TINKERCLOUD_MODEL_ID"
"""Environment variable with the model that a program trains; absent if it creates its own."""
BASE_MODEL = "TINKERCLOUD_BASE_MODEL"
"""Environment variable with the base model; absent if none was named."""
STATE_DIR = "TINKERCLOUD_PROGRAM_DIR"
"""Environment variable with a folder of the program's own. It may be lost between restarts; what a
program needs in order to resume belongs into the `state` of its progress."""
BASE_URL = "TINKER_BASE_URL"
API_KEY = "TINKER_API_KEY"
HF_ENDPOINT = "HF_ENDPOINT"

EXIT_FINAL = 78
"""Exit status of a program that would fail again: it is not restarted (`EX_CONFIG`)."""

MAX_SOURCE_CHARACTERS = 256 << 10
MAX_STATE_BYTES = 64 << 10

Argument = Annotated[str, StringConstraints(max_length=8192), Storable]
ModuleName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)
]


class ProgramPhase(StrEnum):
    """Where a program is in its life."""

    PENDING = "Pending"
    """It was accepted and has not started."""
    RUNNING = "Running"
    """It runs, or waits for its next restart."""
    SUCCEEDED = "Succeeded"
    """It exited with status 0."""
    FAILED = "Failed"
    """It failed and is not restarted."""
    STOPPED = "Stopped"
    """Its owner stopped it."""

    @property
    def is_final(self) -> bool:
        """Whether the program has ended."""
        return self not in {ProgramPhase.PENDING, ProgramPhase.RUNNING}


class RunProgramRequest(WireModel):
    """POST programs: train a model with RLVE, or run a Python file or an installed module."""

    module: ModuleName | None = None
    """Module to run, as with `python -m`."""
    source: Annotated[str, StringConstraints(max_length=MAX_SOURCE_CHARACTERS), Storable] | None = (
        None
    )
    """Text of the Python file to run."""
    rlve_config: RlveConfig | None = None
    """Configuration with which RLVE trains `model_id`, as in create_model."""
    args: Annotated[Items[Argument], Field(max_length=128)] = Field(default_factory=list)
    """Command-line arguments."""
    name: Name | None = None
    """Name to show in lists; default: the module, or `program.py`."""
    base_model: Name | None = None
    """Base model that the program is to use; `TINKERCLOUD_BASE_MODEL` in its environment."""
    model_id: Name | None = None
    """Existing model that the program is to train; `TINKERCLOUD_MODEL_ID` in its environment."""

    @model_validator(mode="after")
    def _has_one_form(self) -> "RunProgramRequest":
        if [self.module, self.source, self.rlve_config].count(None) != 2:
            raise ValueError(
                "set one of module (an installed module), source (a file's text) and rlve_config"
            )
        if self.rlve_config is not None and not self.rlve_config.enabled:
            raise ValueError("rlve_config: enabled is false; set it to true")
        if self.rlve_config is not None and self.model_id is None:
            raise ValueError("model_id: is required; name the model that RLVE is to train")
        return self


class EnvironmentProgress(WireModel):
    """How training on one RLVE environment proceeds."""

    difficulty: Annotated[int, Field(ge=0)]
    """Highest difficulty that is sampled now."""
    metric: float | None = None
    """Mean metric of the newest window at this difficulty, 0 to 1; None before the first."""
    prompts: Annotated[int, Field(ge=0)] = 0
    """Number of prompts so far."""


class ProgramProgress(WireModel):
    """What a program reports about itself: POST programs/{id}/progress.

    A report replaces the earlier one, but a field that is absent keeps its value.
    """

    step: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    """Number of finished steps."""
    total_steps: Annotated[int, Field(ge=0)] | None = None
    reward: float | None = None
    """Mean reward of the newest step."""
    environments: dict[Name, EnvironmentProgress] | None = None
    model_id: Name | None = None
    """Model that the program trains now; differs from its first one if that was lost."""
    checkpoint: Uri | None = None
    """Newest checkpoint to resume from (`tinker://.../weights/...`)."""
    sampler: Uri | None = None
    """Newest checkpoint to sample from (`tinker://.../sampler_weights/...`)."""
    metrics: dict[Name, float] | None = None
    """Any other numbers."""
    state: dict[str, Any] | None = None
    """What the program needs in order to resume from `checkpoint`; at most 64 KiB as JSON."""


class ProgramInfo(WireModel):
    """A program, as in GET programs/{id}."""

    program_id: str
    owner: str
    name: str
    base_model: str | None = None
    model_id: str | None = None
    phase: ProgramPhase
    restarts: int = 0
    exit_code: int | None = None
    """Status of the newest exit; negative for a signal. None if it has not exited."""
    message: str | None = None
    """Why it failed, restarts or waits."""
    progress: ProgramProgress = ProgramProgress()
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ProgramList(WireModel):
    """GET programs: newest first."""

    programs: list[ProgramInfo]


class ProgramLogs(WireModel):
    """GET programs/{id}/logs: the newest output, standard output and standard error together."""

    program_id: str
    text: str
