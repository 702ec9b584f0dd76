"""The actor that runs in the process of one rank."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, missing in __all__

from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker import logs
from tinkercloud_worker.actors.shared_tensors import send_through_shared_memory
from tinkercloud_worker.device import accelerator

SALVAGE = "salvage"
"""Ray concurrency group of the one method that may be called while another runs."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Result of a command at one rank: a value, or the client error that was raised."""

    value: Any
    refusal: WireError | None = None
    times: tuple[float, float] = (0.0, 0.0)
    """When it started and finished, in seconds from 1970-01-01 in UTC."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The location of a rank."""

    node: str
    """Id of the node in the Ray cluster."""
    gpus: Mapping[str, str]
    """Environment (CUDA_VISIBLE_DEVICES) that gives other processes there this rank's GPUs."""


class Worker(Protocol):
    """The interface of the worker object, in addition to the methods that commands name."""

    def salvage(self) -> Any:  # noqa: ANN401 - depends on the object
        """Return the state that outlives a lost group, without other ranks and without changes."""


class Rank:
    """One process of a group: a member of its torch process group with one worker object.

    A factory creates the object, which does the work, once the process group is initialized. The
    group calls the methods here, one at a time except for `salvage`.
    """

    def __init__(self) -> None:
        # Until the object is created, modules are imported, which leaves no garbage.
        gc.disable()
        logs.configure()
        send_through_shared_memory()

    def open_store(self, size: int) -> tuple[str, int]:
        """Open the rendezvous store of the group; return its address and port."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(
        self, rank: int, size: int, address: tuple[str, int], seconds: float, backend: str
    ) -> None:
        """Join the group; return once all ranks have joined.

        Args:
            rank: number of this rank.
            size: number of ranks.
            address: address and port of the store, which rank 0 runs.
            seconds: timeout of collective operations, including the first.
            backend: backend of `torch.distributed`.
        """
        if rank:
            self._store = TCPStore(*address, size, is_master=False)
        timeout = timedelta(seconds=seconds)
        # NCCL creates a group's communicator at the first operation, and waits here for its id.
        self._store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=self._store,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )

    def build(self, factory: Callable[[], Worker]) -> None:
        """Create the worker object."""
        # Later collections skip imported modules.
        gc.freeze()
        gc.enable()
        self._worker = factory()

    def call(self, method: str, args: tuple[object, ...]) -> RankAnswer:
        """Call a method of the object."""
        started = time.time()
        try:
            value = getattr(self._worker, method)(*args)
        except WireError as error:
            return RankAnswer(None, error, (started, time.time()))
        return RankAnswer(value, None, (started, time.time()))

    def call_without_result(self, method: str, args: tuple[object, ...]) -> RankAnswer:
        """Call a method of the object and discard its result."""
        return replace(self.call(method, args), value=None)

    def call_in_parts(self, method: str, args: tuple[object, ...]) -> Iterator[Any]:
        """Call a method of the object that yields; yield the same, and a RankAnswer at the end.

        Ray copies what is yielded into the object store of this node before the method continues.
        """
        started = time.time()
        try:
            value = yield from getattr(self._worker, method)(*args)
        except WireError as error:
            yield RankAnswer(None, error, (started, time.time()))
        else:
            yield RankAnswer(value, None, (started, time.time()))

    def location(self) -> RankAnswer:
        """Return the location of this rank."""
        node, moment = ray.get_runtime_context().get_node_id(), time.time()
        location = RankLocation(node, accelerator.visible_devices_env())
        return RankAnswer(location, None, (moment, moment))

    def salvage(self) -> Any:  # noqa: ANN401 - depends on the object
        """Return the object's state that outlives the group, even while a command hangs."""
        return self._worker.salvage()
