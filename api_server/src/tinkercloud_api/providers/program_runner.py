"""Interface of the runners of programs: child processes of a local server, Jobs on Kubernetes.

A runner starts a program, restarts it after failures, and reports each change of its state. It
keeps nothing in the catalog; `tinkercloud_api.runs.owner_programs` does, and decides who may do
what.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from tinkercloud_protocol.programs.program_messages import ProgramPhase


@dataclass(frozen=True, slots=True)
class ProgramLaunch:
    """A program to run. Its `repr` does not show the environment, which contains its API key."""

    program_id: str
    """Unique; letters, digits and hyphens, at most 40 characters."""
    owner: str
    module: str | None
    """Module to run with `python -m`; None if `source` is set."""
    source: str | None
    """Text of the Python file to run; None if `module` is set."""
    args: tuple[str, ...]
    model_id: str | None
    """Model that it trains; on Kubernetes the Job runs next to its TrainingSession."""
    environment: Mapping[str, str] = field(repr=False)
    """Variables of `tinkercloud_protocol.programs.program_messages`, without those that the runner
    itself knows (`STATE_DIR`). `API_KEY` among them is secret."""
    restarts: int = 0
    """Restarts so far, if an earlier server already ran it."""


@dataclass(frozen=True, slots=True)
class ProgramState:
    """What a runner knows about a program."""

    phase: ProgramPhase
    restarts: int = 0
    exit_code: int | None = None
    message: str | None = None
    started_at: datetime | None = None
    """Start of the first attempt, if this runner knows it."""
    finished_at: datetime | None = None
    """Set in final phases only."""


ProgramChanged = Callable[[str, ProgramState], None]
"""Called on the event loop with a program's id and its new state."""


class ProgramRunner(Protocol):
    """Starts, observes and stops programs."""

    async def start(self, changed: ProgramChanged) -> None:
        """Begin to work; `changed` is called for each change of a program's state from now on."""

    def refusal(self, base_model: str | None) -> str | None:
        """Return why programs of a base model cannot run here; None if they can."""

    async def resume(self, launch: ProgramLaunch) -> bool:
        """Observe a program that an earlier server started, if it still runs.

        Args:
            launch: the program, without its API key.

        Returns:
            Whether it does not have to be started again.
        """

    async def close(self) -> None:
        """Stop everything that must not outlive this process, without a change of phases."""

    async def run(self, launch: ProgramLaunch) -> None:
        """Start a program and keep it running until it ends. Idempotent by `program_id`.

        Raises:
            InvalidRequest: this runner cannot run it; the message says why and what to do.
            Unavailable: it cannot be started now.
        """

    async def halt(self, program_id: str) -> None:
        """Stop a program: SIGTERM, then SIGKILL. The caller records that it stopped. Idempotent.

        Raises:
            Unavailable: it cannot be stopped now.
        """

    async def logs(self, program_id: str, max_bytes: int) -> bytes:
        """Return the newest output, at most `max_bytes`; empty if there is none.

        Raises:
            Unavailable: the output cannot be read now.
        """
