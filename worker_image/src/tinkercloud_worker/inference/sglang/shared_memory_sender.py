"""Copies a whole model to shared memory, part by part, for an SGLang engine on the same machine.

It writes lines of JSON:

    {"handles": ["gASV..."]}        handles of the next part, one per rank, in base64
    {"done": true}                  all parts were loaded
    {"error": "what went wrong"}    the last line, if it failed

It reads one line for each part that the engine has loaded, and frees the part's memory then.

A handle is what torch pickles when it sends a tensor to another process, restricted to the names
that SGLang's unpickler allows. It is valid on one machine, for processes that share /dev/shm and
/tmp.
"""

import base64
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, get_args

import torch
from torch import Tensor
from torch.multiprocessing import set_sharing_strategy
from torch.multiprocessing.reductions import rebuild_storage_filename

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.inference.sender_process import Say, run_sender
from tinkercloud_worker.inference.sglang.tensors import bucket, buckets, flatten


def main() -> None:
    """Share all parts of a file."""
    options = _options()
    # The other strategy passes file descriptors, which only related processes can receive.
    set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    run_sender(lambda say, loaded: _work(options, say, loaded))


def _options() -> Namespace:
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--file", required=True, type=Path)
    parser.add_argument("--most-bytes", required=True, type=int)
    parser.add_argument("--memory", required=True, choices=get_args(accelerator.Memory))
    parser.add_argument("--ranks", required=True, type=int)
    return parser.parse_args()


def _work(options: Namespace, say: Say, loaded: "SimpleQueue[dict[str, Any]]") -> None:
    in_use: Tensor | None = None
    for part in buckets(options.file, options.most_bytes):
        ordered, flat = flatten(part)
        # The engine is still reading the previous part.
        shared = flat.to(options.memory)
        handles = [_handle(ordered, shared) for _ in range(options.ranks)]
        if in_use is not None:
            loaded.get()
        in_use = shared
        say({"handles": handles})
    if in_use is not None:
        loaded.get()
    say({"done": True})


def _handle(ordered: dict[str, Tensor], shared: Tensor) -> str:
    """Return a pickled flattened bucket with a handle of its bytes, for one use."""
    written = BytesIO()
    _Handles(written).dump(bucket(ordered, shared))
    return base64.b64encode(written.getvalue()).decode()


class _Handles(ForkingPickler):
    """Pickles tensors as torch does for its own processes, so that others can open them."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as in its base
        if isinstance(value, Tensor) and (handle := accelerator.ipc_handle(value)):
            return handle
        if isinstance(value, torch.UntypedStorage):
            return _of_machine(value)
        return NotImplemented


def _of_machine(
    storage: torch.UntypedStorage,
) -> tuple[Callable[..., torch.UntypedStorage], tuple[Any, ...]]:
    _, file, size = storage._share_filename_cpu_()
    # The process that opens the file drops this reference.
    storage._shared_incref()  # type: ignore[no-untyped-call]
    # torch's manager process removes the files of ended processes once all its users have ended.
    # Without the name of this process's manager, the engine uses its own, and this one ends with
    # us.
    return rebuild_storage_filename, (type(storage), b"", file, size)


if __name__ == "__main__":
    main()
