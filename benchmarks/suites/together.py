"""How much faster eight runs train together than one alone, through the SDK and a server.

Each client trains as a user's loop does: it sends a step before it waits for the last one. The
clients share this process, and all processes share the machine: with small models, most of the time
is that of the SDK.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker
from tinker import types

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, medians
from benchmarks.suites.service import a_datum
from tinkercloud_testing.serving.servers import a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

CLIENTS = 8
ADAM = types.AdamParams()
Shape = tuple[int, int]
"""Sequences of a step, and tokens of each."""
Train = Callable[[Sequence[tinker.TrainingClient], list[types.Datum], int], None]
"""Trains clients for a number of steps each."""


def measure(folder: str) -> Iterator[Measurement]:
    """Yield the ratios of a tiny model, and of the model in the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        tiny = save(tiny_llama(), Path(scratch) / "model")
        yield from _measure("tiny", tiny, {"C8": (4, 64), "C38": (1, 16), "C39": (4, 64)}, 20)
    name = Path(folder).name
    yield from _measure(name, Path(folder), {"C41": (1, 16)}, 6)


def _measure(name: str, folder: Path, rows: dict[str, Shape], steps: int) -> Iterator[Measurement]:
    """Yield a ratio for each row; a client alone takes eight times as many steps."""
    model = f"benchmark/{name}"
    with (
        tempfile.TemporaryDirectory() as scratch,
        a_server(Path(scratch) / "state", {model: folder}) as server,
    ):
        service = server.client()
        clients = [
            service.create_lora_training_client(model, rank=4).result() for _ in range(CLIENTS)
        ]
        for row, (sequences, length) in rows.items():
            data = [a_datum(length)] * sequences
            train, each = (_at_once, 5) if row == "C8" else (_in_loops, steps)
            ratio, note = _ratio(clients, data, train, each)
            how = "5 steps sent at once" if train is _at_once else "loops"
            what = f"8 clients' steps/s / one client's, {sequences}x{length} tokens, {name}, {how}"
            yield Measurement(row, what, ratio, "x", *_wanted(row), note)


def _wanted(row: str) -> tuple[str, str]:
    return (">= 2.5", ">= 4") if row == "C38" else (">= 1.0", ">= 2")


def _ratio(
    clients: Sequence[tinker.TrainingClient], data: list[types.Datum], train: Train, steps: int
) -> tuple[float, str]:
    """Return the ratio of the rates, and both as text."""
    alone, together = medians(
        lambda: train(clients[:1], data, CLIENTS * steps),
        lambda: train(clients, data, steps),
        rounds=5,
    )
    count = CLIENTS * steps
    return alone / together, f"{count / alone:.1f}/s alone, {count / together:.1f}/s together"


def _at_once(clients: Sequence[tinker.TrainingClient], data: list[types.Datum], steps: int) -> None:
    """Send all steps before waiting for the first result."""
    futures = [future for _ in range(steps) for of in clients for future in _send(of, data)]
    for future in futures:
        future.result()


def _in_loops(
    clients: Sequence[tinker.TrainingClient], data: list[types.Datum], steps: int
) -> None:
    """Train each client in a loop of its own."""

    def loop(client: tinker.TrainingClient) -> None:
        last = _send(client, data)
        for _ in range(steps - 1):
            following = _send(client, data)
            for future in last:
                future.result()
            last = following
        for future in last:
            future.result()

    with ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(loop, clients))


def _send(client: tinker.TrainingClient, data: list[types.Datum]) -> list[tinker.APIFuture[Any]]:
    return [client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)]
