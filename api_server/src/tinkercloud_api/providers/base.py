"""What a provider of session heads does."""

from dataclasses import dataclass
from typing import Protocol

from tinkercloud_protocol.errors import WireError
from tinkercloud_protocol.futures import QueueState


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that can be trained and sampled."""

    name: str
    max_context_length: int
    architecture: str | None = None
    local_path: str | None = None
    """Its folder, if it lies on this machine."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a head is needed for."""

    target: str
    """The training run or sampling session."""
    owner: str
    base_model: str


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """How to reach a head. A head that is started again has another generation."""

    url: str
    token: str
    generation: str

    def __repr__(self) -> str:
        return f"HeadRoute(url={self.url!r}, generation={self.generation!r})"


@dataclass(frozen=True, slots=True)
class Waiting:
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

    def find(self, placement: Placement) -> HeadRoute | None:
        """Return the head that serves a placement now; None if none does.

        A head that is stopping is still found. Once it is not, it writes nothing any more, so what
        it has suspended can be looked for.
        """

    async def acquire(self, placement: Placement) -> HeadRoute:
        """Return a head for a placement, starting one if need be; wait until it is ready.

        Cancelling gives up the wait, not the start.

        Raises:
            NotFound: the base model is not on offer.
            HeadFailed: the head could not be started.
        """

    def waiting(self, placement: Placement) -> Waiting:
        """Return why `acquire` has not returned yet."""
