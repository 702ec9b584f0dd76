"""The ranks of a fake engine: processes that join process groups with SGLang's own functions.

Each rank is a real process, which can be killed, or stopped as if it hung. As in SGLang, the ranks
of an engine have a default group of their own before they join any other.
"""

import asyncio
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tinkercloud_testing.sglang_definitions import own_functions


class EngineRanks:
    """The processes of one engine."""

    def __init__(self, size: int) -> None:
        """Start them.

        Args:
            size: how many.
        """
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        # The fork server has loaded torch once, and has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size, str(store)), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            # A rank that ends must be the last that holds its end.
            theirs.close()

    async def call(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method of SGLang's WeightUpdater in each rank.

        Returns:
            What each returned; the words of what it raised, if anything.

        Raises:
            EOFError: a rank has gone.
        """
        calls = [asyncio.to_thread(_ask, end, method, arguments) for end in self._ends]
        return await asyncio.gather(*calls)

    def kill(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def stop(self) -> None:
        """Make the processes hang from now on."""
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)


def _ask(end: Connection, method: str, arguments: Mapping[str, Any]) -> Any:
    try:
        end.send((method, dict(arguments)))
        return pickle.loads(end.recv_bytes())  # noqa: S301 - of our own process
    except (BrokenPipeError, ConnectionResetError):
        raise EOFError from None


def _serve(end: Connection, rank: int, size: int, store: str) -> None:
    """Serve calls until the connection closes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    sglang = own_functions()
    updater = SimpleNamespace(tp_rank=rank, device="cpu", _model_update_group={})
    updater._receive_bucketed_weights_from_distributed = lambda **arguments: (
        sglang._receive_bucketed_weights_from_distributed(updater, **arguments)
    )
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = getattr(sglang, method)(updater, **arguments)
        except Exception as error:  # noqa: BLE001 - SGLang catches whatever it is too
            answer = str(error)
        # Tensors would otherwise be handles of what this process has.
        end.send_bytes(pickle.dumps(answer))
