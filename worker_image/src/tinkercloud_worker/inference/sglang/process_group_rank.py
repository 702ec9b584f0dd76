"""Rank 0 of a process group with one SGLang engine: a process that broadcasts weights from files.

It is a separate process because it must be killable whatever it waits for: NCCL may end a process
that waits for a dead rank, and a process in a collective operation reads no input. When it ends,
its connections close, and the engine stops waiting. Its collective operations never interleave with
a trainer's.

It reads lines of JSON, `{"file": a safetensors file, "most_bytes": size of a part}`, and ends at
the end of the input, even in the middle of a broadcast. It writes these lines:

    {"port": 29500}                                 port of its store, first
    {"joined": true}                                all ranks have joined (gloo)
    {"names": [], "dtypes": [], "shapes": []}       tensors of the next part
    {"sent": 12}                                    number of parts, all received
    {"error": "what went wrong"}                    the last line, if it failed
"""

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined] # public, missing in __all__
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.inference.sender_process import Say, run_sender
from tinkercloud_worker.inference.sglang.encoded_tensors import buckets, flatten

Broadcast = Callable[[Tensor], None]
"""Broadcasts bytes to all other ranks; returns once their memory may be reused."""
_SET_BY_ENGINES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Settings of SGLang that NCCL requires to be equal at all ranks."""
_SET_BY_DIVIDED_ENGINES = {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"}
"""Further settings of deterministic engines with several ranks."""


def main() -> None:
    """Send the requested models until the input ends."""
    options = _options()
    run_sender(lambda say, asked: _work(options, say, asked))


def _work(options: Namespace, say: Say, asked: "SimpleQueue[dict[str, Any]]") -> None:
    timeout = timedelta(seconds=options.seconds)
    store = _store(options.address, timeout)
    say({"port": store.port})
    broadcast = _join(options, store, timeout)
    say({"joined": True})
    while True:
        request = asked.get()
        parts = buckets(Path(request["file"]), request["most_bytes"])
        say({"sent": sum(_sent(part, broadcast, say) for part in parts)})


def _options() -> Namespace:
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--backend", required=True, choices=accelerator.DEVICE_OF_BACKEND)
    parser.add_argument("--address", required=True)
    parser.add_argument("--world-size", required=True, type=int)
    parser.add_argument("--group-name", required=True)
    parser.add_argument("--seconds", required=True, type=float)
    return parser.parse_args()


def _store(address: str, timeout: timedelta) -> TCPStore:
    """Return a store that listens on one address only: any client can write to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _join(options: Namespace, store: Store, timeout: timedelta) -> Broadcast:
    """Join the group that SGLang's ranks join with `init_custom_process_group`.

    Ranks find each other in the store under prefixes: the group's name from the rendezvous, then
    name and device from torch's `_new_process_group_helper`. Gloo waits for all ranks here, NCCL in
    its first broadcast.
    """
    device = accelerator.DEVICE_OF_BACKEND[options.backend]
    for prefix in (options.group_name, f"{options.group_name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    if options.backend == "gloo":
        options_of_broadcast = dist.BroadcastOptions()
        options_of_broadcast.rootRank, options_of_broadcast.rootTensor = 0, 0
        gloo = ProcessGroupGloo(store, 0, options.world_size, timeout)
        return lambda flat: gloo.broadcast([flat], options_of_broadcast).wait()  # type: ignore[attr-defined] # as above
    os.environ.update(_SET_BY_ENGINES)
    engine_ranks = options.world_size - 1
    if engine_ranks > 1:
        os.environ.update(_SET_BY_DIVIDED_ENGINES)
    return accelerator.broadcast_from_gpu(store, options.world_size, timeout)


def _sent(part: dict[str, Tensor], broadcast: Broadcast, say: Say) -> int:
    """Send a part as one flat tensor of bytes, preceded by a line with its layout."""
    ordered, flat = flatten(part)
    say(
        {
            "names": list(ordered),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in ordered.values()],
            "shapes": [list(tensor.shape) for tensor in ordered.values()],
        }
    )
    broadcast(flat)
    return 1


if __name__ == "__main__":
    main()
