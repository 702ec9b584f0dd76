"""Rank 0 of a process group with one SGLang engine: a process that broadcasts weights from files.

It is a process of its own because it must be killed whatever it waits for: NCCL may end a process
that waits for a rank which has died, and one that waits in a collective reads no input. Once it has
ended, its connections are closed, and the engine stops waiting. Its collectives can never
interleave with a trainer's.

It reads lines of JSON, `{"file": a safetensors file, "most_bytes": of a part}`, and ends when there
are no more to come, be it in the middle of a broadcast. It writes such lines:

    {"port": 29500}                                 where its store listens, first of all
    {"joined": true}                                all ranks that can be waited for are there
    {"names": [], "dtypes": [], "shapes": []}       of the part that is broadcast next
    {"sent": 12}                                    parts of the file, all of which were taken
    {"error": "what went wrong"}                    the last line, if anything did
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
from tinkercloud_worker.inference.sglang.tensors import buckets, flatten

Broadcast = Callable[[Tensor], None]
"""Broadcasts bytes to all other ranks; returns once their memory may be reused."""
_SET_BY_ENGINES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets for itself, and NCCL needs to be alike at all ranks."""
_SET_BY_DIVIDED_ENGINES = {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"}
"""What it sets too where a deterministic engine has several ranks."""


def main() -> None:
    """Send the models that are asked for, until the input ends."""
    options = _options()
    run_sender(lambda say, asked: _work(options, say, asked))


def _work(options: Namespace, say: Say, asked: "SimpleQueue[dict[str, Any]]") -> None:
    patience = timedelta(seconds=options.seconds)
    store = _store(options.address, patience)
    say({"port": store.port})
    broadcast = _join(options, store, patience)
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


def _store(address: str, patience: timedelta) -> TCPStore:
    """Return a store that listens at one address alone: whoever reaches it may write to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _join(options: Namespace, store: Store, patience: timedelta) -> Broadcast:
    """Make the group whose other ranks SGLang's `init_custom_process_group` makes.

    Ranks find each other in the store under prefixes: the group's name where a rendezvous ends,
    then those of torch's `_new_process_group_helper`, name and device. Gloo waits for all ranks
    here, NCCL in its first broadcast.
    """
    device = accelerator.DEVICE_OF_BACKEND[options.backend]
    for prefix in (options.group_name, f"{options.group_name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    if options.backend == "gloo":
        whence = dist.BroadcastOptions()
        whence.rootRank, whence.rootTensor = 0, 0
        gloo = ProcessGroupGloo(store, 0, options.world_size, patience)
        return lambda flat: gloo.broadcast([flat], whence).wait()  # type: ignore[attr-defined] # as above
    os.environ.update(_SET_BY_ENGINES)
    ranks_of_the_engine = options.world_size - 1
    if ranks_of_the_engine > 1:
        os.environ.update(_SET_BY_DIVIDED_ENGINES)
    return accelerator.broadcast_from_gpu(store, options.world_size, patience)


def _sent(part: dict[str, Tensor], broadcast: Broadcast, say: Say) -> int:
    """Send a part as one flat tensor of bytes; the engine is told what lies where in it."""
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
