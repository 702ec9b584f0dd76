"""Losses that harm their process, or take too much, fail their own request by name."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import psutil
import pytest
import torch

from tinkercloud_protocol.losses.loss_limits import LossLimits
from tinkercloud_protocol.losses.traced_losses import MAX_NODES, CustomLoss
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.training import uploaded_losses
from tinkercloud_testing.training.uploaded_losses import (
    Node,
    a_method,
    a_node,
    computed,
    of_nodes,
    on,
    on_server,
    ref,
    stored,
    total,
    uploaded,
)
from tinkercloud_worker.custom_losses import processes as loss_processes
from tinkercloud_worker.custom_losses.inputs import DatumInputs
from tinkercloud_worker.custom_losses.nursery import (
    LossChild,
    LossEnded,
    Nursery,
    NurseryLost,
)
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss

pytestmark = pytest.mark.timeout(180)

T = TypeVar("T")

LEAST = np.full(3, -(2**63), np.int64)
ONES = np.full(3, -1, np.int64)
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0])


def of_integers(*nodes: Node, result: str = "n") -> bytes:
    """Return a loss of integers x and y that uses a node's result."""
    loss = of_nodes(*nodes, *total(result), inputs={"logprobs": 1, "x": 1, "y": 1})
    return stored(loss)


def narrowed(dtype: str, *nodes: Node) -> list[Node]:
    """Return nodes behind others that make x the least number of a dtype, and y -1."""
    bits = int(dtype.removeprefix("int"))
    return [
        a_node("shifted", "operator.add", ref("x"), 0),
        a_method("none", "mul", ref("shifted"), 0),
        a_method("least", "sub", ref("none"), 2 ** (bits - 1)),
        a_method("small", "to", ref("least"), {"dtype": dtype}),
        a_method("minus", "to", ref("y"), {"dtype": dtype}),
        *nodes,
    ]


DEADLY = {
    "function": [a_node("n", "torch.div", ref("x"), ref("y"), rounding_mode="trunc")],
    "other name": [a_node("n", "torch.divide", ref("x"), ref("y"), rounding_mode="trunc")],
    "method": [a_method("n", "div", ref("x"), ref("y"), rounding_mode="trunc")],
    "other method": [a_method("n", "divide", ref("x"), ref("y"), rounding_mode="trunc")],
    "int32": narrowed(
        "int32", a_node("n", "torch.div", ref("small"), ref("minus"), rounding_mode="trunc")
    ),
}
HARMLESS = {
    "floor": [a_node("n", "torch.div", ref("x"), ref("y"), rounding_mode="floor")],
    "floor_divide": [a_node("n", "torch.floor_divide", ref("x"), ref("y"))],
    "operator": [a_node("n", "operator.floordiv", ref("x"), ref("y"))],
    "modulus": [a_node("n", "operator.mod", ref("x"), ref("y"))],
    "fmod": [a_node("n", "torch.fmod", ref("x"), ref("y"))],
    "remainder": [a_method("n", "remainder", ref("x"), ref("y"))],
    "int16": narrowed(
        "int16", a_node("n", "torch.div", ref("small"), ref("minus"), rounding_mode="trunc")
    ),
    "true division": [a_node("n", "torch.true_divide", ref("x"), ref("y"))],
    "power": [a_node("n", "torch.pow", ref("x"), 1 << 53)],
    "overflow": [a_node("n", "operator.mul", ref("x"), ref("x"))],
    "huge exponents": [
        a_method("f", "double", ref("x")),
        a_node("n", "torch.float_power", ref("f"), 1e300),
    ],
    "a tiny modulus": [
        a_method("f", "double", ref("x")),
        a_node("n", "torch.fmod", ref("f"), 5e-324),
    ],
    "nothing": [a_method("n", "narrow", ref("x"), 0, 0, 0)],
    "undefined": [a_node("n", "operator.mul", ref("y"), {"float": "nan"})],
}


@pytest.mark.parametrize("nodes", DEADLY.values(), ids=DEADLY)
def test_an_operation_that_ends_its_process_fails_its_request_in_words(nodes: list[Node]) -> None:
    deadly = of_integers(*nodes)

    with pytest.raises(LossEnded, match=r"'raw'.*SIGFPE.*integer division") as error:
        on_server(deadly, LOGPROBS, x=LEAST, y=ONES)

    assert (error.value.status, error.value.category) == (400, "user")
    # Values decide, and the next request finds another process.
    loss, _, _ = on_server(deadly, LOGPROBS, x=ONES, y=2 * ONES)
    assert np.isfinite(float(loss))


@pytest.mark.parametrize("nodes", HARMLESS.values(), ids=HARMLESS)
def test_neighbours_of_deadly_operations_return_or_fail_in_words(nodes: list[Node]) -> None:
    try:
        _, gradient, _ = on_server(of_integers(*nodes), LOGPROBS, x=LEAST, y=ONES)
    except InvalidRequest as error:
        assert "'raw', node 'n'" in error.message  # noqa: PT017 - either outcome is right
    else:
        assert gradient.tolist() == [1.0, 1.0, 1.0]


def products(count: int) -> list[Node]:
    """Return nodes with matrix products of the outer product of logprobs."""
    products = [
        a_node(f"m{index + 1}", "torch.mm", ref(f"m{index}"), ref("m0")) for index in range(count)
    ]
    first = a_node("m0", "torch.outer", ref("logprobs"), ref("logprobs"))
    return [first, *products, a_method("n", "mean", ref(f"m{count}"))]


def long_one(count: int = 64) -> bytes:
    """Return a loss that takes minutes for a long datum; the check of costs would refuse it."""
    return stored(of_nodes(*products(count), *total("n")))


def unchecked(those: LossProcesses, definition: bytes, length: int, owner: str = "owner") -> Any:
    """Compute a loss without the check of its cost."""
    data = [DatumInputs((length,), {})]
    return computed(UploadedLoss(those, owner, definition), [-torch.rand(length)], data)


@pytest.mark.parametrize(
    ("limits", "length", "reason"),
    [
        (
            {"max_loss_seconds": 0.3},
            2500,
            r"took more than 0\.3 seconds \(limits\.max_loss_seconds",
        ),
        ({"max_loss_cpu_seconds": 1}, 2500, r"SIGXCPU.*limits\.max_loss_cpu_seconds"),
        ({"max_loss_bytes": 1 << 26}, 6000, r"more memory than 67108864 bytes.*max_loss_bytes"),
    ],
    ids=["wall clock", "CPU time", "memory"],
)
def test_a_loss_beyond_a_limit_is_ended_and_names_the_limit(
    limits: dict[str, float], length: int, reason: str
) -> None:
    those = uploaded_losses.processes(**limits)

    with pytest.raises(LossEnded, match=reason):
        unchecked(those, long_one(), length)

    loss, _, _ = on(those, uploaded(lambda logprobs: (logprobs.sum(), {})), LOGPROBS)
    assert float(loss) == -6.0


def test_a_process_has_no_more_threads_than_its_cpu_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def threads(head: int, **limits: float) -> int:
        monkeypatch.setattr(torch, "get_num_threads", lambda: head)
        return loss_processes._num_threads(LossLimits.model_validate(limits))

    assert (threads(2), threads(64)) == (2, 3)
    assert threads(64, max_loss_cpu_seconds=1) == 1
    assert threads(64, max_loss_cpu_seconds=640) == 32


def test_the_limits_are_those_of_a_request_and_not_of_its_parts() -> None:
    those = uploaded_losses.processes(max_loss_seconds=0.3)
    loss = UploadedLoss(those, "owner", uploaded(lambda logprobs: (logprobs.exp().sum(), {})))

    def all_parts() -> None:
        for _ in range(10_000):
            computed(loss, [LOGPROBS], [DatumInputs((3,), {})])

    with pytest.raises(LossEnded, match="max_loss_seconds"):
        all_parts()


def awaited(find: Callable[[], T]) -> T:
    """Return what a function finds, as soon as it finds something."""
    wait_until(lambda: bool(find()), "something", 150)
    return find()


def started(those: LossProcesses, owner: str) -> tuple[threading.Thread, list[BaseException]]:
    """Start a loss of an owner that takes minutes; return its thread, and later its error."""
    errors: list[BaseException] = []

    def compute() -> None:
        try:
            unchecked(those, long_one(500), 4000, owner)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    return thread, errors


def children() -> set[int]:
    """Return the processes of the nursery of this test process, once no task uses any."""
    wait_until(lambda: all(each.name != "loss" for each in threading.enumerate()), "all tasks")
    return {each.pid for each in psutil.Process(uploaded_losses.nursery().pid).children()}


def busy(nursery_pid: int) -> list[psutil.Process]:
    """Return the children of a nursery that compute for long."""
    children = psutil.Process(nursery_pid).children()
    return [each for each in children if each.cpu_times().user > 0.5]


def test_a_slow_loss_holds_up_no_other_owner_and_may_be_killed_from_outside() -> None:
    those = uploaded_losses.processes(max_loss_seconds=150, max_loss_cpu_seconds=300)
    thread, errors = started(those, "slow")
    (slow,) = awaited(lambda: busy(uploaded_losses.nursery().pid))

    for _ in range(3):
        on(those, uploaded(lambda logprobs: (logprobs.sum(), {})), LOGPROBS)
    assert thread.is_alive()

    slow.kill()
    thread.join()
    (error,) = errors
    assert isinstance(error, LossEnded)
    assert "SIGKILL" in error.message


def test_owners_take_turns_if_there_are_more_of_them_than_processes() -> None:
    those = uploaded_losses.processes(max_loss_processes=1)
    definition = uploaded(lambda logprobs: (logprobs.sum(), {}))
    losses = [UploadedLoss(those, f"owner {index}", definition) for index in range(3)]
    data = [DatumInputs((3,), {})]
    before = children()

    found = [float(computed(loss, [LOGPROBS], data).losses[0]) for loss in losses * 2]

    assert found == [-6.0] * 6
    assert len(children() - before) == 1


def has_ended(pid: int) -> bool:
    process = psutil.Process(pid)
    is_zombie: bool = process.status() == psutil.STATUS_ZOMBIE
    return is_zombie and process.num_threads() == 1


def test_an_idle_process_that_was_killed_is_replaced() -> None:
    those = uploaded_losses.processes(max_loss_seconds=19)
    definition = uploaded(lambda logprobs: (logprobs.sum(), {}))
    before = children()
    on(those, definition, LOGPROBS)
    (pid,) = children() - before

    os.kill(pid, signal.SIGKILL)
    # Its socket is open until the last of its threads has ended.
    wait_until(lambda: has_ended(pid), "its end")

    assert float(on(those, definition, LOGPROBS)[0]) == -6.0


HEAD = """
import threading, torch
from tinkercloud_protocol.losses.loss_limits import LossLimits
from tinkercloud_worker.custom_losses.nursery import Nursery
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
nursery = Nursery.forked()
import sys
sys.path[:0] = sys.argv[1:]
from test_loss_processes import long_one, unchecked
limits = LossLimits(max_loss_seconds=150, max_loss_cpu_seconds=300)
those = LossProcesses(limits, nursery)
print(nursery.pid, flush=True)
unchecked(those, long_one(500), 4000)
"""


def test_a_head_that_is_killed_leaves_neither_processes_nor_memory() -> None:
    shared = set(os.listdir("/dev/shm"))  # noqa: PTH208, S108 - names only
    command = [sys.executable, "-c", HEAD, str(Path(__file__).parent), *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        nursery = psutil.Process(int(head.stdout.readline()))
        (child,) = awaited(lambda: busy(nursery.pid))
        head.kill()

    wait_until(lambda: not child.is_running() and not nursery.is_running(), "their end")

    assert set(os.listdir("/dev/shm")) <= shared  # noqa: PTH208, S108


def test_a_nursery_that_was_killed_is_replaced() -> None:
    nursery = Nursery.started()
    those = LossProcesses(LossLimits(), nursery)
    definition = uploaded(lambda logprobs: (logprobs.sum(), {}))
    try:
        os.kill(nursery.pid, signal.SIGKILL)

        assert float(on(those, definition, LOGPROBS)[0]) == -6.0
    finally:
        those.close()


def a_sum(those: LossProcesses) -> float:
    """Return the loss of `LOGPROBS` that sums them."""
    return float(on(those, uploaded(lambda logprobs: (logprobs.sum(), {})), LOGPROBS)[0])


def test_an_owner_whose_process_could_not_be_replaced_gets_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    those = LossProcesses(LossLimits(), uploaded_losses.nursery())

    def fail() -> NoReturn:
        raise ValueError("an answer of the nursery that is none")

    monkeypatch.setattr(those, "_started", fail)
    with pytest.raises(Unavailable, match="an answer of the nursery"):
        a_sum(those)
    monkeypatch.undo()
    # The next one ends its process.
    find = those._child_of

    def found(owner: str) -> LossChild:
        child = find(owner)
        os.kill(child.pid, signal.SIGKILL)
        monkeypatch.setattr(those, "_started", fail)
        return child

    monkeypatch.setattr(those, "_child_of", found)
    with pytest.raises(LossEnded, match="SIGKILL"):
        a_sum(those)
    monkeypatch.undo()

    assert a_sum(those) == -6.0


def test_a_task_for_which_no_thread_starts_fails_and_the_owners_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    those = LossProcesses(LossLimits(), uploaded_losses.nursery())

    def fail(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(Unavailable, match="can't start new thread"):
            a_sum(those)

    assert a_sum(those) == -6.0


def test_a_late_answer_of_the_nursery_is_not_that_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Nursery.started()
    those = LossProcesses(LossLimits(), late)
    try:
        a_sum(those)
        with monkeypatch.context() as patched:
            patched.setattr("tinkercloud_worker.custom_losses.nursery._START_SECONDS", 0.0)
            with pytest.raises(NurseryLost):
                late.start(1, 1 << 26)
        with pytest.raises(NurseryLost):
            late.start(1, 1 << 26)
    finally:
        those.close()


@pytest.mark.long
def test_the_end_of_the_nursery_is_no_fault_of_the_loss_that_ran() -> None:
    nursery = Nursery.started()
    limits = LossLimits(max_loss_seconds=150, max_loss_cpu_seconds=300)
    those = LossProcesses(limits, nursery)
    try:
        thread, errors = started(those, "slow")
        (slow,) = awaited(lambda: busy(nursery.pid))
        scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (slow.pid, nursery.pid)]
        os.kill(nursery.pid, signal.SIGKILL)
        thread.join()
    finally:
        those.close()

    assert [type(error) for error in errors] == [Unavailable]
    assert scores == ["1000\n", "900\n"]


def test_a_task_that_runs_while_its_processes_are_closed_starts_no_nursery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    those = LossProcesses(LossLimits(), Nursery.started())
    find = those._child_of

    def never() -> NoReturn:
        raise AssertionError("another nursery")

    monkeypatch.setattr(Nursery, "started", never)

    def closed(owner: str) -> LossChild:
        those.close()
        return find(owner)

    monkeypatch.setattr(those, "_child_of", closed)
    with pytest.raises(Unavailable, match="stopping"):
        a_sum(those)


def test_a_nursery_that_hangs_is_ended() -> None:
    nursery = Nursery.started()
    os.kill(nursery.pid, signal.SIGSTOP)

    nursery.close()
    nursery.close()

    assert not psutil.pid_exists(nursery.pid)


A_SUM = a_method("s", "sum", ref("logprobs"))
REFUSED: dict[str, Sequence[Node]] = {
    "an integer": [a_method("n", "argmax", ref("logprobs"))],
    "no gradient": [A_SUM, a_method("n", "detach", ref("s"))],
    "a vector": [a_method("n", "exp", ref("logprobs"))],
    "one element in a vector": [A_SUM, a_method("n", "reshape", ref("s"), 1)],
    "a pair": [a_method("n", "max", ref("logprobs"), 0)],
    "a number": [a_method("n", "size", ref("logprobs"), 0)],
    "in place": [
        a_method("i", "clone", ref("logprobs")),
        a_node("n", "operator.iadd", ref("logprobs"), 1),
    ],
}


@pytest.mark.parametrize("nodes", REFUSED.values(), ids=REFUSED)
def test_results_that_are_no_differentiable_scalar_are_refused(nodes: Sequence[Node]) -> None:
    with pytest.raises(InvalidRequest, match="'raw'"):
        on_server(stored(of_nodes(*nodes)), LOGPROBS)


@pytest.mark.parametrize(
    "nodes",
    [
        [a_node("n", "torch.add", ref("n"), 1)],
        [a_node("a", "torch.add", ref("n"), 1), a_node("n", "torch.add", ref("a"), 1)],
        [a_method("n", "exp", ref("logprobs")), a_method("n", "sum", ref("logprobs"))],
        [a_node("n", "operator.lshift", ref("logprobs"), 64)],
    ],
    ids=["itself", "a circle", "one name twice", "shifts"],
)
def test_graphs_without_an_order_and_other_operations_are_refused(nodes: list[Node]) -> None:
    with pytest.raises(InvalidRequest, match=r"graph\.nodes"):
        stored(of_nodes(*nodes))


def test_a_hundred_thousand_nodes_are_refused_and_the_most_allowed_ones_run() -> None:
    def chain(count: int) -> CustomLoss:
        nodes = [A_SUM]
        for index in range(count):
            nodes.append(a_node(f"a{index}", "torch.add", ref(nodes[-1]["name"]), 1))
        return of_nodes(*nodes)

    with pytest.raises(ValueError, match="at most 512"):
        chain(100_000)
    loss, gradient, _ = on_server(stored(chain(MAX_NODES - 3)), LOGPROBS)

    assert (float(loss), gradient.tolist()) == (MAX_NODES - 3 - 6.0, [1.0, 1.0, 1.0])


def test_an_index_out_of_range_keeps_the_process() -> None:
    picked = of_integers(a_method("n", "gather", ref("logprobs"), 0, ref("x")))
    on_server(picked, LOGPROBS, x=np.array([0]), y=ONES)
    before = children()

    with pytest.raises(InvalidRequest, match="out of bounds"):
        on_server(picked, LOGPROBS, x=np.array([1 << 40]), y=ONES)

    on_server(picked, LOGPROBS, x=np.array([0]), y=ONES)
    assert children() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_losses_of_other_dtypes_have_the_gradient_of_torch(dtype: torch.dtype) -> None:
    def loss(logprobs: torch.Tensor) -> Any:
        return (logprobs.to(dtype) * 3).exp().sum(), {"custom/nan:mean": logprobs.sum() * torch.nan}

    leaf = LOGPROBS.clone().requires_grad_()
    expected, _ = loss(leaf)
    (its_gradient,) = torch.autograd.grad(expected, leaf)

    value, gradient, metrics = on_server(uploaded(loss), LOGPROBS)

    assert float(value) == pytest.approx(float(expected.detach()))
    assert torch.equal(gradient, its_gradient)
    assert np.isnan(metrics["custom/nan:mean"])
