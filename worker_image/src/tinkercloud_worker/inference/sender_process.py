"""A process that sends full models from their folders to an engine.

It is a separate process so that it can be killed whatever it waits for, without ending anything
else. Both sides write lines of JSON: the process reports its progress or its error. The head starts
it or, if ranks train, an actor on the node of rank 0 (`actors.weight_store`).
"""

import asyncio
import json
import os
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

from tinkercloud_worker.inference.client import Json, ServerError

Say = Callable[[dict[str, Any]], None]
"""Writes a line to the parent process."""

_LONGEST_LINE = 16 << 20


class SenderProcess:
    """The parent's side; see `weight_host.WeightSender`. Belongs to one event loop."""

    def __init__(self, process: Process, purpose: str) -> None:
        """Wrap a running process; see `start`."""
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        assert process.stdout is not None  # noqa: S101 - as above
        self._process = process
        self._purpose = purpose
        self._input, self._output = process.stdin, process.stdout

    @classmethod
    async def start(
        cls,
        module: str,
        options: Mapping[str, str],
        purpose: str,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a process.

        Args:
            module: module to run.
            options: command line options.
            purpose: purpose of the process, for error messages.
            environment: variables in addition to the environment of this process.

        Raises:
            ServerError: the process can't be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                *(word for option in options.items() for word in option),
                stdin=PIPE,
                stdout=PIPE,
                limit=_LONGEST_LINE,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise ServerError(f"{purpose} failed: {error}") from None
        return cls(process, purpose)

    async def has_ended(self) -> bool:
        """See `weight_host.WeightSender.has_ended`."""
        return self._output.at_eof()

    def send(self, line: Json) -> None:
        """Write a line to the process."""
        self._input.write(orjson.dumps(line) + b"\n")

    async def receive(self, seconds: float) -> dict[str, Any]:
        """See `weight_host.WeightSender.receive`."""
        try:
            async with asyncio.timeout(seconds):
                line = await self._output.readline()
        except TimeoutError:
            raise self.failure(f"the sender process did not respond for {seconds:.0f} s") from None
        if not line:
            raise self.failure(
                f"the sender process exited with status {await self._process.wait()}"
            )
        message: dict[str, Any] = orjson.loads(line)
        if "error" in message:
            raise self.failure(message["error"])
        return message

    def failure(self, reason: str) -> ServerError:
        """Return the error to raise when its work has failed."""
        return ServerError(f"{self._purpose} failed: {reason}")

    async def kill(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def address_towards(url: str) -> str:
    """Return the local address of connections to a server, without connecting.

    Raises:
        OSError: there is no route to the server.
    """
    where = urlsplit(url)
    port = where.port or {"http": 80, "https": 443}[where.scheme]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=(where.hostname or "", port)
    )
    try:
        address: str = transport.get_extra_info("sockname")[0]
    finally:
        transport.close()
    return address


def run_sender(work: Callable[[Say, "SimpleQueue[dict[str, Any]]"], None]) -> None:
    """Run the work of a sender process, and report errors to its parent.

    The process ends with its parent. Other output, such as NCCL's messages, goes to the log.

    Args:
        work: called with a function that writes to the parent, and a queue of the parent's lines.
    """
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=output)

    try:
        work(say, _lines_of_parent())
    except Exception as error:  # noqa: BLE001 - the head logs it, whatever it is
        say({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _lines_of_parent() -> "SimpleQueue[dict[str, Any]]":
    lines: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines
