"""The processes that compute custom losses, and the nursery that starts them.

The nursery imports torch, and with the first process what it needs beyond that. Then it does
nothing else than fork: another process is ready in milliseconds. It ends when the head closes its
socket, however the head ends, and its children end with it. It also reports how a child has ended,
which only a parent learns.

`python -m tinkercloud_worker.custom_losses.child FD` runs a nursery on a socket.
"""

import ctypes
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.custom_losses.costs import check_cost, import_all
from tinkercloud_worker.custom_losses.graphs import CompiledLoss, compiled, is_out_of_memory
from tinkercloud_worker.custom_losses.messages import CostTask, ReceivedTask

MAX_MESSAGE_BYTES = 4096
TASK = struct.Struct("<d")
"""What accompanies the memory of a task: the CPU seconds that it may take."""
ANSWER = struct.Struct("<Bd")
"""How a task has ended, and the CPU seconds that it took; a message in UTF-8 may follow."""
DONE, FAILED, OUT_OF_MEMORY = 0, 1, 2
_PR_SET_PDEATHSIG = 1
_NICENESS = 5
"""The engine of the head goes first."""
_OOM_SCORE, _OOM_SCORE_OF_NURSERY = 1000, 900
"""If the kernel ends one process for lack of memory, it ends a loss; else the nursery, and not the
head with all models."""


def serve(control: socket.socket) -> None:
    """Start processes and end them, as the head asks, until it closes the socket."""
    _prepare()
    with control:
        while True:
            try:
                message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
            except OSError:
                return
            if not message:
                return
            asked = json.loads(message)
            if "end" in asked:
                answer = {"status": _end(asked["end"])}
            else:
                import_all()
                answer = {"pid": _start(control, socket.socket(fileno=files[0]), asked["start"])}
            with suppress(OSError):
                control.send(json.dumps(answer).encode())


def _prepare() -> None:
    # These processes end with the head, which may still need them while it stops. Terminals and
    # service managers send their signals to all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A head may have been started with this signal ignored; the kernel would then forget how
    # processes ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        os.nice(_NICENESS)
    _set_oom_score(_OOM_SCORE_OF_NURSERY)


def _set_oom_score(score: int) -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - procfs
        file.write(str(score))


def _start(control: socket.socket, channel: socket.socket, config: Mapping[str, Any]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        _run_and_exit(channel, config, nursery)
    channel.close()
    return pid


def _end(pid: int) -> int:
    """End a process, unless it has ended; return its status (`os.waitstatus_to_exitcode`)."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _run_and_exit(channel: socket.socket, config: Mapping[str, Any], nursery: int) -> NoReturn:
    """Compute tasks, and end the process when the head has closed the channel."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            _set_oom_score(_OOM_SCORE)
            _limit(config["threads"], config["max_bytes"])
            _work(channel)
            status = 0
    except ConnectionError:
        # The head has closed the channel, and has the process ended.
        status = 0
    except BaseException:  # noqa: BLE001 - `os._exit` would hide it
        traceback.print_exc()
    finally:
        # Without what a nursery or a head would do at its end.
        os._exit(status)


def _limit(threads: int, max_bytes: int) -> None:
    """Limit memory, once what every loss needs is there: threads, their stacks and torch's own."""
    torch.set_num_threads(threads)
    torch.ones(1 << 16, requires_grad=True).exp().sum().backward()  # type: ignore[no-untyped-call]
    most = _data_bytes() + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA limits."""
    with open("/proc/self/status") as file:  # noqa: PTH123 - procfs
        sizes = dict(line.split(":", 1) for line in file)
    return int(sizes["VmData"].split()[0]) << 10


def _work(channel: socket.socket) -> None:
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        (cpu_seconds,) = TASK.unpack(message)
        used = _cpu_seconds()
        _limit_cpu(used + cpu_seconds)
        kind, text = _answered(files[0])
        reason = text.encode(errors="replace")[:1000]
        channel.send(ANSWER.pack(kind, _cpu_seconds() - used) + reason)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _limit_cpu(seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), hard))


def _answered(fd: int) -> tuple[int, str]:
    """Compute a task; return how it ended, and why."""
    try:
        try:
            task = ReceivedTask.read(fd)
        finally:
            os.close(fd)
        if "shapes" in task.described:
            cost = CostTask.read(task.described)
            check_cost(cost.definition, cost.shapes, cost.max_bytes)
        else:
            _compute(task)
    except InvalidRequest as error:
        return FAILED, error.message
    except Exception as error:  # noqa: BLE001 - whatever a loss leads to
        if is_out_of_memory(error):
            return OUT_OF_MEMORY, ""
        return FAILED, f"{type(error).__name__}: {error}".partition("\n")[0]
    return DONE, ""


def _compute(task: ReceivedTask) -> None:
    """Compute a loss of each datum, one after another, and write the results.

    Raises:
        InvalidRequest: an operation failed.
    """
    loss, results = compiled(task.definition), task.described["results"]
    losses, metrics = task.array(results["losses"]), task.array(results["metrics"])
    with torch.enable_grad():
        for index, places in enumerate(task.described["data"]):
            given = {n: torch.from_numpy(task.array(place)) for n, place in places.items()}
            value, gradient, found = _differentiated(loss, given)
            losses[index], metrics[index] = value, found
            task.array(results["gradients"][index])[...] = gradient.numpy()


def _differentiated(
    loss: CompiledLoss, given: dict[str, torch.Tensor]
) -> tuple[float, torch.Tensor, list[float]]:
    leaf = given["logprobs"].requires_grad_()
    value, metrics = loss.run([given[each.name] for each in loss.inputs])
    (gradient,) = torch.autograd.grad(value.double(), leaf)
    return float(value.detach()), gradient, [float(each.detach()) for each in metrics]


def main() -> None:
    """Run a nursery on the socket whose descriptor is the only argument."""
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
