"""The machine from which full models are sent to engines: the head's, or that of rank 0.

A separate process sends them (`sender_process`), which the host starts on the machine that has the
files.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_worker.inference import sender_process
from tinkercloud_worker.inference.client import Json, ServerError
from tinkercloud_worker.inference.weights_folder import SavedWeights


class WeightHostLost(ServerError):
    """The machine, or the host's process there, was lost with all weights stored only there."""


class WeightSender(Protocol):
    """A process that sends full models to an engine. Belongs to one event loop."""

    async def has_ended(self) -> bool:
        """Return whether the process has ended."""

    def send(self, line: Json) -> None:
        """Write a line to the process."""

    async def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next line from the process.

        Args:
            seconds: timeout.

        Raises:
            WeightHostLost: its machine was lost.
            ServerError: it failed, has ended, or did not respond in time.
        """

    def failure(self, reason: str) -> ServerError:
        """Return the error to raise when its work has failed."""

    async def kill(self) -> None:
        """Kill the process."""


class WeightHost(Protocol):
    """A machine that sends weights. Belongs to one event loop."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """Return a file with a model's weights on that machine, valid until the context ends.

        Raises:
            NotFound: the weights do not exist any more.
            WeightHostLost: the machine was lost, or the weights can't be copied to it.
        """

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> WeightSender:
        """Start a sender process on that machine.

        Args:
            module: module to run.
            options: command line options.
            purpose: purpose of the process, for error messages.

        Raises:
            WeightHostLost: the machine was lost.
            ServerError: the process can't be started.
        """

    async def address_towards(self, url: str) -> str:
        """Return the local address of connections from that machine to a server.

        Raises:
            WeightHostLost: the machine was lost.
            OSError: there is no route to the server.
        """


class HeadWeightHost:
    """The head's machine; see `WeightHost`."""

    def weights_of(self, model: SavedWeights) -> AbstractAsyncContextManager[Path]:
        """See `WeightHost.weights_of`."""
        return nullcontext(model.local_dir / FULL_WEIGHTS)

    async def start(self, module: str, options: Mapping[str, str], purpose: str) -> WeightSender:
        """See `WeightHost.start`."""
        return await sender_process.SenderProcess.start(module, options, purpose)

    async def address_towards(self, url: str) -> str:
        """See `WeightHost.address_towards`."""
        return await sender_process.address_towards(url)
