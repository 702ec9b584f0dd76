"""The head's meter: what is counted for whom, and in which hour."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from tinkercloud_worker.engine.turns.engine_thread import (
    EngineThread,
    NoBackground,
    PieceLimit,
    Pieces,
    Tokens,
)
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.usage_counts import HourOfUsage, Payer, Usage, UsageMeter

ANN, BOB = Payer.of_model("ann", "a:train:0"), Payer.of_model("bob", "b:train:0")
HOUR = 3600.0


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.time = 100 * HOUR

    def __call__(self) -> float:
        return self.time


class Decoding:
    """One decoding step of four seconds, with three tokens for one owner and one for another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_waiting = False

    def has_work(self) -> bool:
        return self.is_waiting

    def step(self) -> Tokens:
        self.is_waiting = False
        self._clock.time += 4
        return {ANN: 3, BOB: 1}


class Passes:
    """Passes that take a second of a clock for each token, and during which requests arrive."""

    def __init__(self, clock: Clock, decoding: Decoding) -> None:
        self._clock = clock
        self._decoding = decoding

    def can_batch(self, _items: Sequence[int], _item: int) -> bool:
        return True

    def run_batch(self, items: Sequence[int], yield_point: Callable[[], None]) -> list[int]:
        self._clock.time += sum(items)
        self._decoding.is_waiting = True
        yield_point()
        return list(items)

    def pieces(self, item: int, _limit: PieceLimit) -> Pieces[int]:
        yield 0
        return self.run_batch([item], lambda: None)[0]


def seconds_of(meter: UsageMeter) -> dict[str, float]:
    """Return the seconds of the engine by owner."""
    return {each.payer.owner: each.usage.engine_seconds for each in meter.changes(0)[1]}


def test_usage_is_counted_in_the_hour_in_which_it_ends() -> None:
    clock = Clock()
    meter = UsageMeter(clock)
    for _ in range(2):
        meter.count(ANN, Usage(trained_tokens=3, sampled_tokens=1))
    clock.time += HOUR
    meter.count(ANN, Usage(trained_tokens=5))
    meter.count(BOB, Usage(cached_tokens=7))

    assert meter.changes(0)[1] == [
        HourOfUsage(100, ANN, Usage(trained_tokens=6, sampled_tokens=2)),
        HourOfUsage(101, ANN, Usage(trained_tokens=5)),
        HourOfUsage(101, BOB, Usage(cached_tokens=7)),
    ]


def test_only_what_has_changed_is_returned_again() -> None:
    meter = UsageMeter(Clock())
    meter.count(ANN, Usage(trained_tokens=3))
    meter.count(BOB, Usage(trained_tokens=3))
    revision, _ = meter.changes(0)

    meter.count(BOB, Usage(trained_tokens=1))

    assert meter.changes(revision)[1] == [HourOfUsage(100, BOB, Usage(trained_tokens=4))]
    assert meter.changes(meter.changes(0)[0])[1] == []


def test_two_days_are_remembered() -> None:
    clock = Clock()
    meter = UsageMeter(clock)
    for _ in range(100):
        clock.time += HOUR
        meter.count(ANN, Usage(trained_tokens=1))

    hours = [each.hour for each in meter.changes(0)[1]]
    assert hours == list(range(152, 201))


def test_counts_of_several_threads_add_up() -> None:
    meter = UsageMeter(Clock())

    def count() -> None:
        for _ in range(1000):
            meter.count(ANN, Usage(sampled_tokens=1))
            meter.count_seconds({ANN: 1, BOB: 1}, 1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {each.payer: each.usage for each in meter.changes(0)[1]} == {
        ANN: Usage(sampled_tokens=4000, engine_seconds=2000.0),
        BOB: Usage(engine_seconds=2000.0),
    }


async def test_a_shared_pass_is_divided_by_tokens_and_decoding_in_it_is_not_part_of_it() -> None:
    clock, meter = Clock(), UsageMeter(Clock())
    decoding = Decoding(clock)
    passes = Passes(clock, decoding)
    thread = EngineThread(lambda error: pytest.fail(repr(error)), now=clock, usage=meter)
    thread.start(decoding)
    may_end = threading.Event()
    busy = asyncio.create_task(thread.run(lambda _: may_end.wait()))
    await asyncio.sleep(0)
    shared = [
        asyncio.create_task(thread.run_batched(passes, tokens, Share(p.owner, p.model_id, tokens)))
        for p, tokens in ((ANN, 10), (BOB, 30))
    ]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(busy, *shared)
    await asyncio.to_thread(thread.stop)

    assert seconds_of(meter) == {"ann": 10 + 3, "bob": 30 + 1}


async def test_all_pieces_of_a_long_job_count_and_those_that_fail_too() -> None:
    clock, meter = Clock(), UsageMeter(Clock())
    thread = EngineThread(lambda error: pytest.fail(repr(error)), now=clock, usage=meter)
    thread.start(NoBackground())

    def fail() -> None:
        clock.time += 7
        raise ValueError("bad")

    await thread.run_batched(Passes(clock, Decoding(clock)), 10, Share("ann", ANN.model_id, 10))
    with pytest.raises(ValueError, match="bad"):
        await thread.run(lambda _: fail(), Share("bob", BOB.model_id, 0))
    await thread.run(lambda _: setattr(clock, "time", clock.time + 100))
    await asyncio.to_thread(thread.stop)

    assert seconds_of(meter) == {"ann": 10, "bob": 7}


def test_the_rate_of_a_model_counts_the_tokens_of_its_last_minute() -> None:
    clock = Clock()
    meter = UsageMeter(clock)

    meter.count(ANN, Usage(trained_tokens=300, engine_seconds=9))
    meter.count(ANN, Usage(prefill_tokens=20, sampled_tokens=40, cached_tokens=1000))
    meter.count(BOB, Usage(forward_tokens=60))

    assert meter.tokens_per_minute(ANN.model_id) == 360
    assert meter.tokens_per_minute(BOB.model_id) == 60
    clock.time += 69
    assert 300 < meter.tokens_per_minute(ANN.model_id) < 360
    clock.time += 1
    assert meter.tokens_per_minute(ANN.model_id) == 0
    assert meter.tokens_per_minute("unknown") == 0
