"""What durability costs: `python -m benchmarks durability`. Figures for docs/contribute/evidence.yaml.

Heads run in this process, without HTTP, so that the ratios contain the head's own work only.
"""

import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig, DurabilityLevel
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.serving.bare_heads import MODEL, WHOLE, Head, a_head, until
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import VOCAB_SIZE, tiny_llama
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker import metrics
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LEVELS: tuple[DurabilityLevel, ...] = ("none", "local", "remote")
SEQUENCES, LENGTH = 4, 64
WANTED_PAUSE_MS = 5


async def step(head: Head, number: int) -> None:
    """Run a step as a client does that sends both requests and then waits for both results."""
    tokens = np.random.default_rng(number).integers(3, VOCAB_SIZE, (SEQUENCES, LENGTH + 1))
    head.add_all(2 * number - 1, tokens.tolist())
    await head.confirmed()
    head.apply(2 * number)
    await head.confirmed()
    await head.answer(2 * number - 1)
    await head.answer(2 * number)


async def paired_steps(heads: list[Head], rounds: int) -> list[list[float]]:
    """Return the seconds of steps of each head; they take turns."""
    for head in heads:
        await head.begin()
        await step(head, 1)
    seconds: list[list[float]] = [[] for _ in heads]
    for number in range(2, rounds + 2):
        for taken, head in zip(seconds, heads, strict=True):
            began = time.perf_counter()
            await step(head, number)
            taken.append(time.perf_counter() - began)
    return seconds


async def costs(
    make: Callable[[], PreTrainedModel], folder: Path, rounds: int
) -> list[tuple[DurabilityLevel, float, float]]:
    """Compare steps with journals to steps without one.

    Returns:
        For each level with a journal, the seconds of a step without it, and how many more one takes
        with it: medians of pairs of steps.
    """
    with ExitStack() as stack:
        heads = [
            stack.enter_context(
                a_head(
                    (folder / "store").as_uri(),
                    folder / level,
                    level,
                    journals=folder / level / "journals" if level != "none" else None,
                    durability=DurabilityConfig(level=level, snapshot_steps=10**6),
                    make=make,
                )
            )
            for level in LEVELS
        ]
        bare, *others = await paired_steps(heads, rounds)
    base = statistics.median(bare)
    return [
        (level, base, statistics.median(np.subtract(seconds, bare).tolist()))
        for level, seconds in zip(LEVELS[1:], others, strict=True)
    ]


def costs_of_tiny_model(folder: Path, rounds: int) -> Iterator[Measurement]:
    """Measure how much more a step takes whose own work takes about no time."""
    for level, base, extra in asyncio.run(costs(tiny_llama, folder, rounds)):
        wanted = "<= 1" if level == "local" else "<= 10"
        note = f"more than {1e3 * base:.1f} ms, median of {rounds} pairs"
        what = f"step with `{level}` - without, tiny model"
        yield Measurement("D1", what, 1e3 * extra, "ms", wanted, note=note)


def costs_of_smollm2(model: str, folder: Path, rounds: int) -> Iterator[Measurement]:
    """Measure the ratio of a step of a real model."""
    load = partial(AutoModelForCausalLM.from_pretrained, model)
    for level, base, extra in asyncio.run(costs(load, folder, rounds)):
        note = f"{1e3 * extra:.1f} ms of {1e3 * base:.0f} ms, median of {rounds} pairs"
        what = f"step with `{level}` / without, SmolLM2"
        yield Measurement("D1", what, 1 + extra / base, "x", "<= 1.02", note=note)


async def repeating(folder: Path, steps: int) -> Measurement:
    """Compare the speed at which a journal is repeated with that of the loop."""
    root, journals = (folder / "store").as_uri(), folder / "journals"
    config = DurabilityConfig(snapshot_steps=10**6)
    with a_head(root, folder, "g1", journals=journals, durability=config) as head:
        await head.begin()
        began = time.perf_counter()
        for number in range(1, steps + 1):
            await step(head, number)
        trained = time.perf_counter() - began
    with a_head(root, folder, "g2", journals=journals, durability=config) as head:
        began = time.perf_counter()
        await head.resume("g1")
        await head.answer(2 * steps)
        repeated = time.perf_counter() - began
    note = f"{steps} steps of the tiny model, without loading the base"
    return Measurement("D2", "repeating / training", trained / repeated, "x", ">= 1", note=note)


def pauses(folder: str, rounds: int) -> Iterator[Measurement]:
    """Measure how long a snapshot occupies the engine's thread, and how long the step after it."""
    trainer = TorchTrainer(TorchBaseModel.load(folder, torch.float32), max_batch_tokens=2048)
    trainer.add_model("m", LoraConfig(rank=32, seed=1))
    data = random_data([LENGTH] * SEQUENCES)
    held, copied, plain = list[float](), list[float](), list[float]()
    threads = ThreadPoolExecutor(1)
    for _ in range(rounds + 1):
        began = time.perf_counter()
        take = trainer.begin_export("m")
        assert trainer.export_gradient("m") is None
        held.append(time.perf_counter() - began)
        copying = threads.submit(take)
        for taken in (copied, plain):
            run(trainer, data)
            trainer.optim_step("m", AdamParams(learning_rate=1e-4))
            taken.append(time.perf_counter() - began)
            began = time.perf_counter()
        copying.result()
    wanted = f"<= {WANTED_PAUSE_MS}"
    what = "pause for a snapshot, rank 32, SmolLM2"
    note = f"largest {1e3 * max(held[1:]):.1f} ms, {rounds} snapshots"
    yield Measurement("D3", what, 1e3 * statistics.median(held[1:]), "ms", wanted, note=note)
    extra = statistics.median(np.subtract(copied[1:], plain[1:]).tolist())
    note = f"{1e3 * extra:.0f} ms of {1e3 * statistics.median(plain[1:]):.0f} ms"
    ratio = 1 + extra / statistics.median(plain[1:])
    yield Measurement(
        "D4", "step during which a snapshot is copied", ratio, "x", "<= 1.05", note=note
    )


class AnonymousMemory:
    """Records the largest anonymous memory of this process while its context lasts."""

    def __enter__(self) -> "AnonymousMemory":
        self.largest = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.largest = max(self.largest, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _num_snapshots() -> float:
    return float(metrics.SNAPSHOTS._value.get())


def _is_written(count: float) -> bool:
    """Return whether there have been more snapshots than that."""
    return _num_snapshots() > count


async def whole_model(model: str, folder: Path, rounds: int) -> list[Measurement]:
    """Measure snapshots of a fully fine-tuned model, which are written while it trains."""
    root, journals = (folder / "store").as_uri(), folder / "journals"
    load = partial(AutoModelForCausalLM.from_pretrained, model)
    plain, during, written, extra = list[float](), list[float](), list[float](), list[int]()
    with a_head(root, folder, "g", journals=journals, make=load, spec=WHOLE) as head:
        await head.begin()
        await step(head, 1)
        durable = head.service.durability.of(str(MODEL))
        assert durable is not None
        for number in range(2, 2 * rounds + 2, 2):
            began, count = time.perf_counter(), _num_snapshots()
            with AnonymousMemory() as usual:
                await step(head, number)
            plain.append(time.perf_counter() - began)
            with AnonymousMemory() as memory:
                began = time.perf_counter()
                durable.note_change()
                await step(head, number + 1)
                during.append(time.perf_counter() - began)
                await until(partial(_is_written, count))
                written.append(time.perf_counter() - began)
            extra.append(memory.largest - usual.largest)
        state = 12 * head.backend.trainer.memory_bytes(str(MODEL)) / 16
    slower = statistics.median(np.subtract(during, plain).tolist())
    base, seconds = statistics.median(plain), statistics.median(written)
    return [
        Measurement(
            "D5",
            "memory for a snapshot / its size, all of SmolLM2",
            max(extra) / state,
            "x",
            "<= 0.2",
            note=f"{max(extra) / 1e6:.0f} MB of {state / 1e6:.0f} MB, {rounds} snapshots",
        ),
        Measurement(
            "D6",
            "step during which it is written",
            1 + slower / base,
            "x",
            "<= 3",
            note=f"{slower:.2f} s more than {base:.2f} s; written after {seconds:.2f} s",
        ),
    ]


def measure(folder: str) -> Iterator[Measurement]:
    """Yield all measurements."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        yield from costs_of_tiny_model(place / "tiny", 40)
        yield asyncio.run(repeating(place / "repeated", 200))
        yield from costs_of_smollm2(folder, place / "large", 10)
        yield from asyncio.run(whole_model(folder, place / "whole", 5))
    yield from pauses(folder, 10)
