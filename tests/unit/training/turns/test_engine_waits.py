"""How long the passes and steps of each owner wait for the engine, as Prometheus reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence

import pytest
from prometheus_client import REGISTRY

from tinkercloud_worker.engine.turns import turn_waits
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground, PieceLimit
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.usage_counts import UsageMeter
from tinkercloud_worker.metrics import count_engine_wait


class Clock:
    """A clock that passes advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Passes:
    """Passes that take a second for each token."""

    def __init__(self, clock: Clock, *, share: bool) -> None:
        self._clock = clock
        self._share = share

    def can_batch(self, _items: Sequence[int], _item: int) -> bool:
        return self._share

    def run_batch(self, items: Sequence[int], _between: Callable[[], None]) -> list[int]:
        self._clock.time += sum(items)
        return list(items)

    def pieces(self, item: int, _limit: PieceLimit) -> Generator[int, None, int]:
        for _ in range(item - 1):
            self._clock.time += 1
            yield 1
        self._clock.time += 1
        return item


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def thread(clock: Clock) -> AsyncIterator[EngineThread]:
    usage = UsageMeter(on_wait=count_engine_wait)
    thread = EngineThread(lambda error: pytest.fail(repr(error)), now=clock, usage=usage)
    yield thread
    await asyncio.to_thread(thread.stop)


async def counted(
    thread: EngineThread, passes: Passes, *sent: tuple[str, str, int]
) -> dict[str, tuple[float, float]]:
    """Send passes at once; return the seconds that each owner has waited, and its passes.

    Args:
        thread: the thread, which has not started.
        passes: how they run.
        sent: their owners, models and tokens.
    """
    before = {owner: _counts(owner) for owner, _, _ in sent}
    running = [
        asyncio.create_task(thread.run_batched(passes, tokens, Share(owner, model, tokens)))
        for owner, model, tokens in sent
    ]
    await asyncio.sleep(0)
    thread.start(NoBackground())
    await asyncio.gather(*running)
    return {
        owner: (now[0] - then[0], now[1] - then[1])
        for owner, then in before.items()
        for now in [_counts(owner)]
    }


def _counts(owner: str) -> tuple[float, float]:
    def count(name: str) -> float:
        return REGISTRY.get_sample_value(f"tinkercloud_owner_{name}_total", {"owner": owner}) or 0

    return count("wait_seconds"), count("requests")


async def test_owners_wait_while_others_compute_between_two_pieces_of_theirs_too(
    thread: EngineThread, clock: Clock
) -> None:
    passes = Passes(clock, share=False)

    found = await counted(thread, passes, ("ann", "a", 3), ("bob", "b", 3))

    # They alternate: ann computes in the seconds 0, 2 and 4.
    assert found == {"ann": (2, 1), "bob": (3, 1)}


async def test_an_owner_alone_never_waits(thread: EngineThread, clock: Clock) -> None:
    assert await counted(thread, Passes(clock, share=False), ("ann", "a", 5)) == {"ann": (0, 1)}


async def test_a_run_waits_for_another_run_of_its_owner(thread: EngineThread, clock: Clock) -> None:
    passes = Passes(clock, share=False)

    found = await counted(thread, passes, ("ann", "a", 1), ("ann", "b", 1))

    assert found == {"ann": (1, 2)}


async def test_those_that_share_a_pass_do_not_wait_for_each_other(
    thread: EngineThread, clock: Clock
) -> None:
    passes = Passes(clock, share=True)

    found = await counted(thread, passes, ("ann", "a", 3), ("bob", "b", 3))

    assert found == {"ann": (0, 1), "bob": (0, 1)}


async def test_a_request_knows_how_long_it_waited_for_its_turns(
    thread: EngineThread, clock: Clock
) -> None:
    passes = Passes(clock, share=False)

    async def waited(owner: str) -> float:
        wait = turn_waits.collect()
        await thread.run_batched(passes, 3, Share(owner, owner, 3))
        return wait.seconds

    running = [asyncio.create_task(waited(owner)) for owner in ("ann", "bob")]
    await asyncio.sleep(0)
    thread.start(NoBackground())

    # They alternate: ann computes in the seconds 0, 2 and 4.
    assert await asyncio.gather(*running) == [2, 3]
