"""The machine from which whole models go to engines: the head's own, or that of a trainer's rank.

What takes them there is a process of its own (`sender_process`), which the place starts beside the
files that it reads.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.weights_folder import SavedWeights


class PlaceLost(ServerError):
    """A machine, or what we have there, has gone, and with it all that only it had."""


class Courier(Protocol):
    """A process that takes whole models to an engine. Belongs to one event loop."""

    async def has_ended(self) -> bool:
        """Return whether there is nothing more to hear."""

    def tell(self, line: Json) -> None:
        """Write it a line."""

    async def heard(self, seconds: float) -> dict[str, Any]:
        """Return what it says next.

        Args:
            seconds: to wait for that.

        Raises:
            PlaceLost: its machine has gone.
            ServerError: it can't go on, has ended, or says nothing.
        """

    def failure(self, reason: str) -> ServerError:
        """Return what to raise where the errand has failed."""

    async def end(self) -> None:
        """End it, whatever it is doing."""


class Place(Protocol):
    """A machine. Belongs to one event loop."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """Have a model's weights lie there, as a file, for as long as the context lasts.

        Raises:
            NotFound: they are gone.
            PlaceLost: the machine is, or they can't be brought there.
        """

    async def start(self, module: str, options: Mapping[str, str], errand: str) -> Courier:
        """Start a process there.

        Args:
            module: that it runs.
            options: its command line.
            errand: what it is for, for the words of errors.

        Raises:
            PlaceLost: the machine has gone.
            ServerError: it can't be started.
        """

    async def address_towards(self, url: str) -> str:
        """Return the address that connections from there to a server come from.

        Raises:
            PlaceLost: the machine has gone.
            OSError: there is no way to the server.
        """


class HeadPlace:
    """The head's own machine; see `Place`."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """See `Place.weights_of`."""
        return nullcontext(model.local_dir / FULL_WEIGHTS)

    async def start(self, module: str, options: Mapping[str, str], errand: str) -> Courier:
        """See `Place.start`."""
        return await sender_process.CourierProcess.start(module, options, errand)

    async def address_towards(self, url: str) -> str:
        """See `Place.address_towards`."""
        return await sender_process.address_towards(url)
