"""The engine thread: the order of jobs, jobs that run as one, and jobs in pieces."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tinkercloud_worker.engine.turns import engine_thread
from tinkercloud_worker.engine.turns.engine_thread import (
    EngineThread,
    NoBackground,
    Pause,
    PieceLimit,
    Unshared,
)
from tinkercloud_worker.engine.turns.fair_queue import Share

BAD = -1
PATIENCE_SECONDS = 60
"""Longest wait for what does not wait."""


class Sums:
    """Answers numbers with the sum of those they ran with, and lets at most three run at once."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def can_batch(self, items: Sequence[int], _item: int) -> bool:
        return len(items) < 3

    def run_batch(self, items: Sequence[int], _between: Callable[[], None]) -> list[int]:
        self.ran.append(list(items))
        if BAD in items:
            raise ValueError("bad")
        return [10 * item + sum(items) for item in items]

    def pieces(self, item: int, _limit: PieceLimit) -> Generator[int, None, int]:
        yield from ()
        return self.run_batch([item], lambda: None)[0]


class Pieces:
    """Runs texts letter by letter, and answers with the text."""

    def __init__(self) -> None:
        self.ran = ""

    def can_batch(self, _items: Sequence[str], _item: str) -> bool:
        return False

    def run_batch(self, items: Sequence[str], _between: Callable[[], None]) -> list[str]:
        return list(items)

    def pieces(self, item: str, _limit: PieceLimit) -> Generator[int, None, str]:
        for index, letter in enumerate(item):
            if index:
                yield 1
            if letter == "!":
                raise ValueError("bad")
            self.ran += letter
        return item


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread(on_crash=lambda error: pytest.fail(repr(error)))
    thread.start(NoBackground())
    yield thread
    thread.stop()


async def while_busy(
    thread: EngineThread, *submitted: Callable[[], asyncio.Task[Any]]
) -> list[Any]:
    """Submit work while a job runs; return its results once that job may end."""
    may_end = threading.Event()
    busy = asyncio.create_task(thread.run(lambda _: may_end.wait()))
    await asyncio.sleep(0)
    tasks = [submit() for submit in submitted]
    await asyncio.sleep(0)
    may_end.set()
    await busy
    return await asyncio.gather(*tasks, return_exceptions=True)


def item(
    thread: EngineThread, group: Sums, number: int, owner: str = "one"
) -> Callable[[], asyncio.Task[int]]:
    share = Share(owner, f"model-{number}", tokens=1)
    return lambda: asyncio.create_task(thread.run_batched(group, number, share))


def followed(thread: EngineThread, group: Any, number: int) -> Callable[[], asyncio.Task[int]]:
    """Submit an item of a model whose next one is said to follow."""
    share = Share("me", f"model-{number}", tokens=1, is_followed=lambda: True)
    return lambda: asyncio.create_task(thread.run_batched(group, number, share))


def text(
    thread: EngineThread, pieces: Pieces, letters: str, owner: str, model: str = "m"
) -> Callable[[], asyncio.Task[str]]:
    share = Share(owner, model, len(letters))
    return lambda: asyncio.create_task(thread.run_batched(pieces, letters, share))


async def test_items_of_a_group_that_wait_run_as_one_and_each_gets_its_own_result(
    thread: EngineThread,
) -> None:
    group = Sums()

    results = await while_busy(thread, *[item(thread, group, n) for n in (1, 2, 3)])

    assert group.ran == [[1, 2, 3]]
    assert results == [16, 26, 36]


async def test_items_that_do_not_join_wait_for_the_next_turn(thread: EngineThread) -> None:
    group = Sums()

    await while_busy(thread, *[item(thread, group, n) for n in (1, 2, 3, 4, 5)])

    assert group.ran == [[1, 2, 3], [4, 5]]


async def test_groups_keep_apart_and_jobs_without_a_share_run_first(thread: EngineThread) -> None:
    one, other = Sums(), Sums()
    order: list[str] = []
    job = lambda: asyncio.create_task(thread.run(lambda _: order.append(f"{one.ran}{other.ran}")))  # noqa: E731 - as `item`

    await while_busy(
        thread, item(thread, one, 1), job, item(thread, other, 5), job, item(thread, one, 2)
    )

    assert (one.ran, other.ran) == ([[1, 2]], [[5]])
    # The busy job was a short one too, so it was the turn of a job with a share.
    assert order == ["[[1, 2]][]", "[[1, 2]][[5]]"]


async def test_after_an_error_each_item_runs_alone_and_only_the_bad_one_fails(
    thread: EngineThread,
) -> None:
    group = Sums()

    results = await while_busy(thread, *[item(thread, group, n) for n in (1, BAD, 3, 4)])

    assert [type(result) for result in results] == [int, ValueError, int, int]
    assert (results[0], results[2]) == (11, 33)
    assert group.ran[0] == [1, BAD, 3]
    assert sorted(group.ran[1:]) == [[BAD], [1], [3], [4]]


async def test_an_owner_who_floods_does_not_fill_the_passes_of_others(
    thread: EngineThread,
) -> None:
    group = Sums()
    flood = [item(thread, group, n, "flooding") for n in range(10, 19)]

    await while_busy(thread, *flood, item(thread, group, 1, "small"))

    assert group.ran[0] == [10, 1, 11]


async def test_others_run_between_the_pieces_of_a_long_job(thread: EngineThread) -> None:
    pieces = Pieces()

    results = await while_busy(
        thread, text(thread, pieces, "aaaaaaaa", "long"), text(thread, pieces, "b", "short")
    )

    assert results == ["aaaaaaaa", "b"]
    assert pieces.ran == "abaaaaaaa"


async def test_jobs_of_one_model_never_run_between_its_pieces(thread: EngineThread) -> None:
    pieces = Pieces()

    await while_busy(
        thread,
        text(thread, pieces, "aaa", "one"),
        text(thread, pieces, "bbb", "one"),
        text(thread, pieces, "ccc", "other"),
    )

    assert pieces.ran.replace("c", "") == "aaabbb"
    assert pieces.ran.replace("b", "").startswith("acac")


async def test_a_piece_that_fails_fails_its_own_job_only(thread: EngineThread) -> None:
    pieces = Pieces()

    results = await while_busy(
        thread, text(thread, pieces, "aa!a", "one"), text(thread, pieces, "bbbb", "other")
    )

    assert isinstance(results[0], ValueError)
    assert results[1] == "bbbb"
    assert pieces.ran.count("a") == 2


async def test_the_rest_of_a_cancelled_job_does_not_run(thread: EngineThread) -> None:
    pieces, reached, may_proceed = Pieces(), threading.Event(), threading.Event()

    def wait(_yield_point: Callable[[], None]) -> None:
        reached.set()
        may_proceed.wait()

    long = text(thread, pieces, "aaaaaaaa", "long")()
    await asyncio.sleep(0)
    waiting = asyncio.create_task(thread.run(wait))
    await asyncio.to_thread(reached.wait)
    long.cancel()
    await asyncio.sleep(0)
    ran = len(pieces.ran)
    may_proceed.set()
    await waiting
    await text(thread, pieces, "b", "other")()

    # The thread may have waited before it began the long job, whose first piece always runs.
    assert pieces.ran.count("a") == max(ran, 1)


async def test_the_next_request_of_an_owner_whose_turn_it_is_does_not_wait_for_a_long_one(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWING_SECONDS", 60)
    thread.weights["small"] = 4
    pieces = Pieces()

    async def two_in_succession() -> None:
        await thread.run_batched(pieces, "s", Share("small", "m", 1, continues=True))
        await thread.run_batched(pieces, "t", Share("small", "m", 100, continues=True))

    await while_busy(
        thread,
        text(thread, pieces, "flood", "large", "one"),
        lambda: asyncio.create_task(two_in_succession()),
    )

    # The thread waits for the second letter of the small owner, but not for a third one.
    assert pieces.ran == "fstlood"


async def test_nothing_of_others_runs_between_a_batch_and_the_step_behind_it(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWING_SECONDS", 60)
    pieces = Pieces()

    flood = asyncio.create_task(
        thread.run_batched(pieces, "f" * 1_000_000, Share("large", "m", 1_000_000))
    )
    # The thread waits for steps only while others use the engine.
    await asyncio.sleep(0)
    for _ in range(3):
        await thread.run_batched(pieces, "b", Share("small", "m", 1000))
        await thread.run_batched(pieces, "s", Share("small", "m", 8, continues=True))
    flood.cancel()

    # By tokens it would be the turn of the large owner, whose letters have one each.
    assert pieces.ran.count("bs") == 3


async def test_models_that_have_shared_a_pass_share_the_next_one_if_their_requests_are_known(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWED_SECONDS", 60)
    group = Sums()

    async def run_followed(model: str, number: int) -> None:
        await thread.run_batched(group, number, Share("me", model, 1, is_followed=lambda: True))

    async def at_once() -> None:
        await run_followed("a", 1)
        await thread.run_batched(group, 3, Share("me", "a", 1))

    async def later() -> None:
        await run_followed("b", 2)
        await asyncio.sleep(0.05)
        await thread.run(lambda _: None)
        await asyncio.sleep(0.05)
        await thread.run_batched(group, 4, Share("me", "b", 1))

    await while_busy(
        thread, lambda: asyncio.create_task(at_once()), lambda: asyncio.create_task(later())
    )

    assert group.ran == [[1, 2], [3, 4]]


async def test_a_request_that_does_not_come_holds_nobody_up_for_long(thread: EngineThread) -> None:
    group, other = Sums(), Sums()

    await while_busy(
        thread,
        followed(thread, group, 1),
        followed(thread, group, 2),
        item(thread, other, 3, "me"),
    )

    assert (group.ran, other.ran) == ([[1, 2]], [[3]])


@pytest.mark.parametrize("kind", [lambda group: group, Unshared], ids=["alone", "unshared"])
async def test_nothing_is_waited_for_after_a_job_that_shared_no_pass(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Sums], Any]
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWED_SECONDS", 1000)
    group, other = Sums(), Sums()
    batcher = kind(group)
    numbers = [1] if batcher is group else [1, 2]

    async with asyncio.timeout(PATIENCE_SECONDS):
        await while_busy(
            thread,
            *[followed(thread, batcher, number) for number in numbers],
            item(thread, other, 3, "me"),
        )

    assert group.ran == [[number] for number in numbers]
    assert other.ran == [[3]]


async def test_an_owner_who_took_no_part_in_a_pass_does_not_wait_for_those_who_did(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWED_SECONDS", 1000)
    group, other = Sums(), Sums()

    async with asyncio.timeout(PATIENCE_SECONDS):
        await while_busy(
            thread,
            *[followed(thread, group, number) for number in (1, 2)],
            item(thread, other, 3, "you"),
        )

    assert sorted(group.ran + other.ran) == [[1, 2], [3]]


async def test_an_owner_who_comes_while_the_thread_waits_for_others_ends_the_wait(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FOLLOWED_SECONDS", 1000)
    group, other = Sums(), Sums()

    async with asyncio.timeout(PATIENCE_SECONDS):
        await while_busy(thread, *[followed(thread, group, number) for number in (1, 2)])
        await item(thread, other, 3, "you")()

    assert other.ran == [[3]]


async def test_what_waits_says_how_much_runs_before_it(thread: EngineThread) -> None:
    reasons: list[str | None] = []

    async def look() -> None:
        reasons.extend(thread.why_waiting("other", model) for model in ("m", "n"))

    pieces = Pieces()
    await while_busy(
        thread,
        text(thread, pieces, "aaa", "one"),
        text(thread, pieces, "bb", "other"),
        text(thread, pieces, "cccc", "one", "second"),
        lambda: asyncio.create_task(look()),
    )

    assert reasons == [
        "waiting for its turn to compute; requests before it: 1 (3 tokens)",
        None,
    ]


class Pausing(Pieces):
    """Waits at each question mark for something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = Future[None]()

    def pieces(self, item: str, _limit: PieceLimit) -> Generator[int | Pause, None, str]:  # type: ignore[override]
        for letter in item:
            if letter == "?":
                yield Pause(self.outside)
            self.ran += letter
        return item


async def test_others_compute_while_a_job_waits_for_something_outside(
    thread: EngineThread,
) -> None:
    pausing = Pausing()
    waiting = text(thread, pausing, "a?b", "one")()
    others = [text(thread, pausing, letters, "two")() for letters in ("c", "d")]

    assert await asyncio.gather(*others) == ["c", "d"]
    assert not waiting.done()
    assert pausing.ran == "acd"

    pausing.outside.set_result(None)
    assert await waiting == "a?b"
    assert pausing.ran == "acd?b"


async def test_a_paused_job_has_not_ended(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()
    monkeypatch.setattr(thread._neighbours, "note_end", ended.append)
    pausing = Pausing()
    waiting = text(thread, pausing, "a?b", "one")()
    assert await text(thread, pausing, "c", "two")() == "c"
    await thread.run_lightweight(lambda: None)
    assert "one" not in ended

    pausing.outside.set_result(None)
    await waiting
    await thread.run_lightweight(lambda: None)
    assert "one" in ended


async def test_a_job_whose_pause_is_over_already_continues(thread: EngineThread) -> None:
    pausing = Pausing()
    pausing.outside.set_exception(ValueError("bad"))

    assert await text(thread, pausing, "a?b", "one")() == "a?b"
