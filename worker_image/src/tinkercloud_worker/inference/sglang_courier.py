"""A process of the head's that takes whole models from their folders to an engine.

It is apart from the head, so that it can be ended whatever it waits for, and takes nothing along
when it ends. Both sides write lines of JSON: it says what it has done, or why it can't go on.
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

import orjson

from tinkercloud_worker.inference.client import Json, ServerError

Say = Callable[[dict[str, Any]], None]
"""Writes a line to the head."""

_LONGEST_LINE = 16 << 20


class Courier:
    """The process, as the head has it. Belongs to one event loop."""

    def __init__(self, process: Process, errand: str) -> None:
        """Take a process that has been started; see `start`."""
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        assert process.stdout is not None  # noqa: S101 - as above
        self._process = process
        self._errand = errand
        self._input, self._output = process.stdin, process.stdout

    @classmethod
    async def start(cls, module: str, options: Mapping[str, str], errand: str) -> Self:
        """Start a process.

        Args:
            module: that it runs.
            options: its command line.
            errand: what it is for, for the words of errors.

        Raises:
            ServerError: it can't be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                *(word for option in options.items() for word in option),
                stdin=PIPE,
                stdout=PIPE,
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            raise ServerError(f"{errand} failed: {error}") from None
        return cls(process, errand)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to hear."""
        return self._output.at_eof()

    def tell(self, line: Json) -> None:
        """Write it a line."""
        self._input.write(orjson.dumps(line) + b"\n")

    async def heard(self, seconds: float) -> dict[str, Any]:
        """Return what it says next.

        Args:
            seconds: to wait for that.

        Raises:
            ServerError: it can't go on, has ended, or says nothing.
        """
        try:
            async with asyncio.timeout(seconds):
                line = await self._output.readline()
        except TimeoutError:
            raise self.failure(f"the head's process said nothing for {seconds:.0f} s") from None
        if not line:
            raise self.failure(f"the head's process has ended ({await self._process.wait()})")
        said: dict[str, Any] = orjson.loads(line)
        if "error" in said:
            raise self.failure(said["error"])
        return said

    def failure(self, reason: str) -> ServerError:
        """Return what to raise where the errand has failed."""
        return ServerError(f"{self._errand} failed: {reason}")

    async def end(self) -> None:
        """End it, whatever it is doing."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def run(work: Callable[[Say, "SimpleQueue[dict[str, Any]]"], None]) -> None:
    """Do such a process's work, and say what goes wrong.

    The process ends with the head, whatever it does then. What else it prints, such as NCCL's own
    words, goes to the log.

    Args:
        work: is given what writes to the head, and what the head has written.
    """
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=output)

    try:
        work(say, _told())
    except Exception as error:  # noqa: BLE001 - whatever it is, the head logs it
        say({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _told() -> "SimpleQueue[dict[str, Any]]":
    lines: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines
