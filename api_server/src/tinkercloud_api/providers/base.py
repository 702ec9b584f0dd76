"""What a provider of session heads does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkercloud_api.providers.session_options import NO_OPTIONS, SessionOptions
from tinkercloud_protocol.errors import WireError
from tinkercloud_protocol.futures import QueueState
from tinkercloud_protocol.launch import ModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that can be trained and sampled."""

    name: str
    max_context_length: int
    architecture: str | None = None
    local_path: str | None = None
    """Its folder, if it lies on this machine."""
    tokenizer: str | None = None
    """Under which name clients, wherever they are, find its tokenizer; None if `name` or, on this
    machine, `local_path` will do."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a head is needed for."""

    target: str
    """The training run or sampling session."""
    owner: str
    base_model: str
    model: ModelSpec | None = None
    """What is trained; None for samplers of a base model or of a saved checkpoint."""
    options: SessionOptions = NO_OPTIONS
    """What the run's client chose about its pods."""


@dataclass(frozen=True, slots=True)
class HeadEndpoint:
    """How to reach a head. A head that is started again has another generation."""

    url: str
    token: str
    generation: str

    def __repr__(self) -> str:
        return f"HeadEndpoint(url={self.url!r}, generation={self.generation!r})"


@dataclass(frozen=True, slots=True)
class Pending:
    """Why a head is not there yet, in the SDK's words and in ours."""

    queue_state: QueueState
    reason: str


class HeadFailed(WireError):
    """A head could not be started; the message says what was seen. Asking again tries again."""

    status = 503
    category = "server"


class SessionProvider(Protocol):
    """Starts, finds and stops session heads."""

    async def start(self) -> None:
        """Find the heads that run already, and begin to watch."""

    async def stop(self) -> None:
        """Stop what this process must not leave behind."""

    def models(self) -> list[ServedModel]:
        """Return the base models on offer."""

    async def admit(self, placement: Placement) -> ModelSpec:
        """Return the model that a run is going to be: as it was asked for, unless chosen otherwise.

        Raises:
            NotFound: what it chose does not exist for its owner.
            InvalidRequest: it may not choose what it does.
            Unavailable: that can't be told at the moment.
        """

    def find(self, placement: Placement) -> HeadEndpoint | None:
        """Return the head that serves a placement now; None if none does. Asking is using."""

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        """Return a head for a placement, starting one if need be; wait until it is ready.

        Cancelling gives up the wait, not the start.

        Raises:
            NotFound: the base model is not on offer.
            StateLost: the placement's head was taken away for good.
            HeadFailed: the head could not be started.
        """

    def waiting(self, placement: Placement) -> Pending:
        """Return why `acquire` has not returned yet."""

    def shared_heads(self) -> list[HeadEndpoint]:
        """Return the running heads that hold many runs, whose idle models this server suspends.

        Heads of one run each are none of them: their providers suspend them whole.
        """

    def runs(self) -> list[str]:
        """Return the runs that something was acquired for alone."""

    async def is_gone(self, placement: Placement) -> bool:
        """Whether what `acquire` once made for a placement was taken away for good.

        Raises:
            Unavailable: that can't be told at the moment.
        """

    def has_ended(self, placement: Placement, generation: str) -> bool:
        """Whether no process of that head is left, so that it writes nothing any more.

        False if that is not known.
        """

    def unsaved(self, placement: Placement) -> Path | None:
        """Return the folder to which heads write what the checkpoint store does not take."""

    def newly_ended(self) -> list[str]:
        """Return the generations of heads whose end was noticed since the last call."""

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """Look again before this endpoint is returned once more: its head is another one by now."""

    async def release(self, placement: Placement) -> None:
        """Take away what `acquire` made for this placement alone. Repeating it is fine.

        Raises:
            Unavailable: it could not be done now.
        """
