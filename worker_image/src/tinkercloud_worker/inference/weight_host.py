"""The machine from which whole models are sent to engines: the head's own, or that of a rank.

What sends them is a process of its own (`sender_process`), which the host starts on the machine
that has the files it reads.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from tinkercloud_protocol.checkpoints import FULL_WEIGHTS
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.weights_folder import SavedWeights


class WeightHostLost(ServerError):
    """A machine, or our process there, has gone, and with it all that only it had."""


class WeightSender(Protocol):
    """A process that sends whole models to an engine. Belongs to one event loop."""

    async def has_ended(self) -> bool:
        """Return whether there is nothing more to receive."""

    def send(self, line: Json) -> None:
        """Write it a line."""

    async def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next line that it writes.

        Args:
            seconds: to wait for that.

        Raises:
            WeightHostLost: its machine has gone.
            ServerError: it can't go on, has ended, or writes nothing.
        """

    def failure(self, reason: str) -> ServerError:
        """Return what to raise where its purpose has failed."""

    async def kill(self) -> None:
        """End it, whatever it is doing."""


class WeightHost(Protocol):
    """A machine. Belongs to one event loop."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """Have a model's weights there, in the file that is returned, until the context ends.

        Raises:
            NotFound: they are gone.
            WeightHostLost: the machine is, or they can't be copied there.
        """

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> WeightSender:
        """Start a process there.

        Args:
            module: that it runs.
            options: its command line.
            purpose: of the process, for the messages of errors.

        Raises:
            WeightHostLost: the machine has gone.
            ServerError: it can't be started.
        """

    async def address_towards(self, url: str) -> str:
        """Return the local address of connections from there to a server.

        Raises:
            WeightHostLost: the machine has gone.
            OSError: there is no route to the server.
        """


class HeadWeightHost:
    """The head's own machine; see `WeightHost`."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """See `WeightHost.weights_of`."""
        return nullcontext(model.local_dir / FULL_WEIGHTS)

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> WeightSender:
        """See `WeightHost.start`."""
        return await sender_process.SenderProcess.start(module, options, purpose)

    async def address_towards(self, url: str) -> str:
        """See `WeightHost.address_towards`."""
        return await sender_process.address_towards(url)
