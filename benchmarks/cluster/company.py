"""A small owner next to one who floods the same engine, with a tiny model."""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement
from benchmarks.suites.training import LORA, a_batch, random_data
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_testing.small_models.models import VOCAB_SIZE, tiny_llama
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.sampling.sampler_interface import StopRules
from tinkercloud_worker.engine.trainer import OptimizerStep, TrainingPass
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.usage_counts import Payer
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

ROUNDS = 20
"""Pieces of work that are timed one after the other, alone or in company."""
TURNS = 5
"""How often they are timed alone and in company, alternately: other work on the machine varies."""
NEVER = StopRules(frozenset(), ())
CHUNKS = 1000
MICRO_BATCH = 2048
"""Tokens of a micro-batch, as heads have by default."""
STEP_TOKENS = 8
"""What an optimizer step counts as, as in heads."""


def measure(_folder: str) -> Iterator[Measurement]:
    with (
        tempfile.TemporaryDirectory() as folder,
        an_engine(tiny_llama(), Path(folder), max_batch_tokens=MICRO_BATCH) as engine,
    ):
        yield from asyncio.run(_measure(engine))


async def _measure(engine: Engine) -> list[Measurement]:
    for name in ("small", *(f"flood-{number}" for number in range(8))):
        engine.trainer.add_model(name, LORA)
    await engine.sampler.publish("base", None)
    floods: Sequence[tuple[str, str, Callable[[], Awaitable[object]]]] = [
        ("C25", "1,000 chunks of 64 tokens", lambda: _chunks(engine, "flood-0", 1)),
        ("C26", "8 models with such chunks", lambda: _all_chunks(engine)),
        ("C27", "one request of 64,000 tokens", lambda: _chunks(engine, "flood-0", CHUNKS)),
    ]
    made = []
    for name, what, flood in floods:
        alone, both = await _alone_and_in_company(lambda: _step(engine), flood)
        made.append(Measurement(name, f"p95 of a step next to {what}", both / alone, "x", "<= 2"))
    alone, both = await _alone_and_in_company(
        lambda: _sample(engine, "small", 1, 5), lambda: _sample(engine, "flood", 640, 32)
    )
    # The sampler drops cancelled requests before it answers another.
    await _sample(engine, "small", 1, 1)
    what = "p95 of a 5-token sample next to 640 samples of 32"
    made.append(Measurement("C28", what, both / alone, "x", "<= 5"))
    return made


async def _alone_and_in_company(
    work: Callable[[], Awaitable[object]], flood: Callable[[], Awaitable[object]]
) -> tuple[float, float]:
    """Return the 95th percentile of the seconds of some work, alone and during a flood."""

    async def floods() -> None:
        while True:
            await flood()

    alone, both = list[float](), list[float]()
    for _ in range(TURNS):
        # What is left of a flood that was cancelled ends before this.
        await work()
        alone += [await _seconds(work) for _ in range(ROUNDS)]
        flooding = asyncio.create_task(floods())
        await asyncio.sleep(0.2)
        both += [await _seconds(work) for _ in range(ROUNDS)]
        flooding.cancel()
        with suppress(asyncio.CancelledError):
            await flooding
    return _p95(alone), _p95(both)


async def _seconds(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def _p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


async def _step(engine: Engine) -> None:
    await _pass(engine, "small", 1)
    await engine.thread.run_batched(
        engine.trainer.stepper,
        OptimizerStep("small", AdamParams()),
        Share("small", "small", STEP_TOKENS, continues=True),
    )


async def _pass(engine: Engine, model: str, chunks: int) -> None:
    batch = _batch(engine.trainer, chunks)
    share = Share(model.split("-", maxsplit=1)[0], model, batch.num_tokens)
    await engine.thread.run_batched(engine.trainer.batcher, TrainingPass(model, batch), share)


@cache
def _batch(trainer: TorchTrainer, chunks: int) -> Batch:
    """Return the same batch each time: making one takes the time of other work on this thread."""
    return a_batch(trainer, random_data([16] * 4 * chunks, VOCAB_SIZE))


async def _chunks(engine: Engine, model: str, size: int) -> None:
    """Run a thousand chunks, as requests of so many."""
    for _ in range(CHUNKS // size):
        await _pass(engine, model, size)


async def _all_chunks(engine: Engine) -> None:
    await asyncio.gather(*[_chunks(engine, f"flood-{number}", 1) for number in range(8)])


async def _sample(engine: Engine, owner: str, count: int, tokens: int) -> None:
    request = a_sampling_request(
        list(range(1, 9)), num_samples=count, max_tokens=tokens, stop=NEVER
    )
    await engine.sampler.sample("base", request.sent_by(Payer(owner, "", "")))
