"""What runs in the process of one rank."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, missing in __all__

from tinkercloud_protocol.errors import WireError
from tinkercloud_worker import logs
from tinkercloud_worker.actors.tensors import send_through_shared_memory
from tinkercloud_worker.device import accelerator

SALVAGE = "salvage"
"""Concurrency group of the one method that is called while another may run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command at one rank: a value, or the client error that it raised."""

    value: Any
    refusal: WireError | None = None


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is."""

    node: str
    """Id of the node in Ray's cluster."""
    gpus: Mapping[str, str]
    """Environment (CUDA_VISIBLE_DEVICES) that gives another process there this rank's GPUs."""


class Worker(Protocol):
    """What a rank needs of its object, beside the methods that commands name."""

    def salvage(self) -> Any:  # noqa: ANN401 - of whatever kind of object
        """Return the state that outlives a lost group. Must need no other rank, change nothing."""


class Rank:
    """One process of a group: a member of its torch process group that holds one worker object.

    The object is made by a factory once the process group stands, and does the work; the methods
    here are what the group calls, one at a time except for `salvage`.
    """

    def __init__(self) -> None:
        # Until the object is made, modules are imported, of which nothing becomes garbage.
        gc.disable()
        logs.configure()
        send_through_shared_memory()

    def open_store(self, size: int) -> tuple[str, int]:
        """Open the store at which the group's ranks meet; return its address and port."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(
        self, rank: int, size: int, address: tuple[str, int], seconds: float, backend: str
    ) -> None:
        """Join the group. Returns once all ranks have.

        Args:
            rank: own number.
            size: number of ranks.
            address: of the store, which is rank 0's.
            seconds: how long a collective operation waits for the other ranks, be it the first.
            backend: of `torch.distributed`.
        """
        if rank:
            self._store = TCPStore(*address, size, is_master=False)
        timeout = timedelta(seconds=seconds)
        # NCCL makes a group's communicator at its first operation, and waits for its id here.
        self._store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=self._store,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )

    def build(self, factory: Callable[[], Worker]) -> None:
        """Make the object that does the work."""
        # Collections from now on skip what has been imported.
        gc.freeze()
        gc.enable()
        self._worker = factory()

    def call(self, method: str, args: tuple[object, ...]) -> Answer:
        """Call a method of the object."""
        try:
            return Answer(getattr(self._worker, method)(*args))
        except WireError as error:
            return Answer(None, error)

    def call_without_result(self, method: str, args: tuple[object, ...]) -> Answer:
        """Call a method of the object for its effect: what it returns is dropped."""
        return Answer(None, self.call(method, args).refusal)

    def call_by_reference(self, method: str, args: tuple[object, ...]) -> Answer:
        """Call a method of the object; what it returns stays in the store of this node.

        The answer's value is a list of one, the reference: Ray would resolve a bare one.
        """
        answer = self.call(method, args)
        return answer if answer.refusal else Answer([ray.put(answer.value)])

    def location(self) -> Answer:
        """Return where this rank is."""
        node = ray.get_runtime_context().get_node_id()
        return Answer(RankLocation(node, accelerator.visible_devices_env()))

    def salvage(self) -> Any:  # noqa: ANN401 - the object's own
        """Return the state of the object that outlives the group; a command may hang meanwhile."""
        return self._worker.salvage()
