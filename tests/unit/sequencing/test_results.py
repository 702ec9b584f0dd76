"""Results wake their waiters and are kept for a time and within limits."""

import asyncio
import tracemalloc
from typing import Any

import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.future_responses import JSON, Result
from tinkercloud_worker.head.order.kept_results import Results


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_store(
    clock: Clock,
    max_bytes: int = 1000,
    dropped: list[str] | None = None,
    room: list[str] | None = None,
    ttl: float = 10,
) -> Results:
    timings = Timings(result_ttl_seconds=ttl, unread_result_ttl_seconds=100)
    on_drop = (dropped if dropped is not None else []).append
    on_room = (room if room is not None else []).append
    return Results(timings, max_bytes, now=clock, on_drop=on_drop, on_room=on_room)


def a_result(size: int = 1) -> Result:
    return Result(b"x" * size, JSON)


def test_a_small_result_takes_little_memory_while_it_is_kept() -> None:
    results, number = a_store(Clock(), 10**6), 500
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(number):
            results.open(f"s:train:0:{index}", b"", "me")
            results.finish(
                f"s:train:0:{index}", future_responses.finished({"metrics": {"step": index}})
            )
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (after - before) / number < 1000


async def test_a_result_wakes_its_waiter() -> None:
    results = a_store(Clock())
    results.open("r", b"", "me")
    waiters = [asyncio.create_task(results.wait("r", seconds=5)) for _ in range(3)]
    await asyncio.sleep(0)

    results.finish("r", a_result())

    assert [await waiter for waiter in waiters] == [a_result()] * 3


async def test_waiting_for_a_result_times_out() -> None:
    results = a_store(Clock())
    results.open("r", b"", "me")

    assert await results.wait("r", seconds=0.01) is None


async def test_a_result_that_was_only_looked_at_is_kept_as_an_unread_one() -> None:
    clock, read = Clock(), list[str]()
    timings = Timings(result_ttl_seconds=10, unread_result_ttl_seconds=100)
    results = Results(
        timings, 1000, now=clock, on_drop=read.append, on_room=read.append, on_read=read.append
    )
    for name in ("s:train:0:1", "s:sample:0:1"):
        results.open(name, b"", "me")
        results.finish(name, a_result())
        assert await results.wait(name, seconds=1, counts_as_read=False) == a_result()

    clock.now = 99
    results.sweep()

    assert read == []
    assert results.forget_read("me", 0) == 0
    assert await results.wait("s:train:0:1", seconds=1) == a_result()
    assert read == ["s:train:0:1"]


async def test_a_result_can_be_read_again_until_it_expires() -> None:
    clock = Clock()
    results = a_store(clock)
    results.open("r", b"", "me")
    results.finish("r", a_result())
    await results.wait("r", seconds=1)

    clock.now = 9
    results.sweep()
    assert await results.wait("r", seconds=1) == a_result()
    clock.now = 11
    results.sweep()

    with pytest.raises(NotFound, match="has expired"):
        await results.wait("r", seconds=1)


async def test_an_unread_result_is_kept_longer() -> None:
    clock = Clock()
    dropped: list[str] = []
    results = a_store(clock, dropped=dropped)
    results.open("r", b"", "me")
    results.finish("r", a_result())

    clock.now = 99
    results.sweep()
    assert dropped == []
    clock.now = 101
    results.sweep()
    assert dropped == ["r"]


async def test_over_the_budget_read_results_are_evicted_and_unread_ones_are_kept() -> None:
    clock = Clock()
    dropped: list[str] = []
    results = a_store(clock, max_bytes=25, dropped=dropped)
    for index, name in enumerate("abc"):
        clock.now = float(index)
        results.open(name, b"", "me")
        results.finish(name, a_result(size=10))
        if name != "c":
            await results.wait(name, seconds=1)

    results.sweep()
    assert dropped == ["a"]
    results.open("d", b"", "me")
    results.finish("d", a_result(size=100))
    results.sweep()

    assert dropped == ["a", "b"]


async def test_there_is_room_again_once_results_are_read_or_abandoned() -> None:
    clock = Clock()
    notified: list[str] = []
    results = a_store(clock, max_bytes=25, room=notified)
    for name in ("a:1", "a:2", "b:1"):
        assert results.has_room("me")
        results.open(name, b"", "me")
        results.finish(name, a_result(size=10))
    assert not results.has_room("me")
    assert results.has_room("another")

    await results.wait("b:1", seconds=1)
    await results.wait("b:1", seconds=1)
    assert results.has_room("me")
    assert notified == ["me"]
    results.open("a:3", b"", "me")
    results.finish("a:3", a_result(size=10))
    assert not results.has_room("me")
    results.abandon("a")
    assert results.has_room("me")
    assert notified == ["me", "me"]


async def test_the_backlog_names_the_results_that_fill_the_budget() -> None:
    results = a_store(Clock(), max_bytes=25)
    for name, size in (("a:1", 10), ("b:1", 30), ("s:sample:0:1", 5)):
        results.open(name, b"", "me")
        results.finish(name, a_result(size=size))

    backlog = results.backlog("me")

    assert (
        "the unread training results of owner 'me' take 40 bytes (2 results; largest: 30 bytes for"
        " b, 10 bytes for a)" in backlog
    )
    assert "limits.max_result_bytes is 25" in backlog


def fill(results: Results, clock: Clock, *names: str, owner: str = "me", size: int = 10) -> None:
    """Finish results, a second after each other."""
    for name in names:
        clock.now += 1
        results.open(name, b"", owner)
        results.finish(name, a_result(size=size))


async def test_unread_samples_are_evicted_before_training_results() -> None:
    clock, dropped = Clock(), list[str]()
    results = a_store(clock, max_bytes=30, dropped=dropped)

    fill(results, clock, "s:train:0:1", "s:sample:0:1", "s:sample:0:2", "s:train:0:2")
    assert dropped == ["s:sample:0:1"]
    fill(results, clock, "s:train:0:3", "s:train:0:4")

    assert dropped == ["s:sample:0:1", "s:sample:0:2"]
    assert not results.has_room("me")


async def test_delivered_results_are_evicted_first_and_recently_read_ones_last() -> None:
    clock, dropped = Clock(), list[str]()
    results = a_store(clock, max_bytes=40, dropped=dropped, ttl=1000)
    fill(results, clock, "s:train:0:1", "s:sample:0:1", "s:train:0:2", "s:train:0:3")
    results.mark_read("s:train:0:2")
    clock.now += 200
    results.mark_read("s:train:0:3")

    for name in ("s:train:0:4", "s:train:0:5", "s:train:0:6"):
        fill(results, clock, name)

    assert dropped == ["s:train:0:2", "s:sample:0:1", "s:train:0:3"]


async def test_each_owner_has_its_own_budget() -> None:
    clock, dropped = Clock(), list[str]()
    results = a_store(clock, max_bytes=20, dropped=dropped)
    fill(results, clock, "b:sample:0:1", "b:sample:0:2", owner="bob")

    fill(results, clock, *[f"e:sample:0:{index}" for index in range(5)], owner="eve")
    fill(results, clock, "e:train:0:1", owner="eve", size=1000)

    assert dropped == [f"e:sample:0:{index}" for index in range(5)]
    for name in ("b:sample:0:1", "b:sample:0:2"):
        assert await results.wait(name, seconds=1) == a_result(size=10)


async def test_a_waiter_gets_a_sample_that_is_evicted_meanwhile() -> None:
    clock = Clock()
    results = a_store(clock, max_bytes=10)
    results.open("s:sample:0:1", b"", "me")
    waiting = asyncio.create_task(results.wait("s:sample:0:1", seconds=5))
    await asyncio.sleep(0)

    fill(results, clock, "s:sample:0:1", "s:sample:0:2")

    assert await waiting == a_result(size=10)
    assert results.digest("s:sample:0:1") is None
    assert await results.wait("s:sample:0:2", seconds=1) == a_result(size=10)


async def test_restored_results_count_for_their_owner() -> None:
    clock = Clock()
    results, next_one = a_store(clock, max_bytes=10), a_store(clock, max_bytes=10)
    fill(results, clock, "s:train:0:1", "s:train:0:2")
    results.mark_read("s:train:0:2")

    for kept in results.export(lambda _: True):
        next_one.restore(kept, "me")

    assert not next_one.has_room("me")
    next_one.mark_read("s:train:0:1")
    assert next_one.has_room("me")


class Unwalked(dict[str, Any]):
    """Entries that can be looked up, but not iterated over."""

    def items(self) -> Any:
        raise AssertionError

    __iter__ = keys = values = items


def forbid_scans(patch: pytest.MonkeyPatch, results: Results) -> None:
    """Make an iteration over all results fail."""
    patch.setattr(results, "_entries", Unwalked(results._entries))


async def test_abandoning_a_target_does_not_scan_other_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    results = a_store(clock, max_bytes=10)
    for _ in range(2):
        results.open("a:1", b"", "me")
        results.open("b:1", b"", "me")
        results.finish("a:1", a_result(size=10))
        assert not results.has_room("me")

        with monkeypatch.context() as patch:
            forbid_scans(patch, results)
            results.abandon("a")
            results.abandon("nobody")

        assert results.has_room("me")
        clock.now += 11
        results.sweep()
        assert results.digest("a:1") is None


async def test_expiring_results_does_not_scan_other_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    dropped: list[str] = []
    results = a_store(clock, dropped=dropped)
    for index in range(6):
        clock.now = float(index)
        results.open(f"a:{index}", b"", "me")
        results.finish(f"a:{index}", a_result())
        if index % 2:
            results.mark_read(f"a:{index}")
    forbid_scans(monkeypatch, results)

    clock.now = 12
    results.sweep()
    assert dropped == ["a:1"]
    clock.now = 103
    results.sweep()

    assert dropped == ["a:1", "a:0", "a:2", "a:3", "a:5"]


async def test_the_ttl_of_an_abandoned_result_starts_when_it_finishes() -> None:
    clock = Clock()
    results = a_store(clock)
    results.open("a:1", b"", "me")
    results.abandon("a")

    clock.now = 50
    results.sweep()
    results.finish("a:1", a_result())
    results.sweep()
    assert results.has_room("me")
    assert results.digest("a:1") is not None
    clock.now = 61
    results.sweep()

    assert results.digest("a:1") is None


async def test_dropping_an_unread_result_frees_its_room() -> None:
    clock = Clock()
    results = a_store(clock, max_bytes=10)
    results.open("a:1", b"", "me")
    results.finish("a:1", a_result(size=10))
    assert not results.has_room("me")

    clock.now = 101
    results.sweep()

    assert results.has_room("me")


async def test_a_failure_marked_as_read_before_it_finishes_takes_no_room() -> None:
    results = a_store(Clock(), max_bytes=5)
    results.open("a:1", b"", "me")
    results.mark_read("a:1")
    results.finish("a:1", a_result(size=10))

    assert results.has_room("me")


async def test_a_second_result_is_ignored() -> None:
    results = a_store(Clock())
    results.open("r", b"", "me")
    results.finish("r", a_result(1))
    results.finish("r", a_result(2))

    assert await results.wait("r", seconds=1) == a_result(1)


async def test_an_unknown_request_is_not_found() -> None:
    with pytest.raises(NotFound, match="never sent"):
        await a_store(Clock()).wait("nobody", seconds=1)
