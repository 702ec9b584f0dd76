"""A client waits for all of its samples in one poll, which also names those that are lost."""

import asyncio

import orjson
import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.responses.batched_futures import (
    CLIENT_NUMBERS,
    Cursor,
    SamplingSessionTarget,
)
from tinkercloud_protocol.wire.future_responses import JSON, PROTOBUF, Result
from tinkercloud_worker.head.order.kept_results import Results

SESSION = "s:sample:0"


def a_store(max_bytes: int = 1000) -> Results:
    timings = Timings(result_ttl_seconds=10, unread_result_ttl_seconds=100)
    return Results(timings, max_bytes, now=lambda: 0.0)


def a_target(client: int = 0) -> SamplingSessionTarget:
    return SamplingSessionTarget(sampling_session_id=SESSION, cloned_sampler_id=client)


def sample(results: Results, seq_id: int, size: int = 1, content_type: str = PROTOBUF) -> str:
    name = f"{SESSION}:{seq_id}"
    results.open(name, b"", "me")
    results.finish(name, Result(b"x" * size, content_type))
    return name


async def poll(
    results: Results, cursor: int = 0, client: int = 0, seconds: float = 5
) -> tuple[list[dict[str, object]], int]:
    body = orjson.loads(await results.completions.wait(a_target(client), cursor, seconds))
    return body["completions"], body["cursor"]


async def test_a_poll_returns_each_completed_sample_once() -> None:
    results = a_store()
    sample(results, 0, size=7)
    first, cursor = await poll(results)
    sample(results, 1, content_type=JSON)
    second, cursor = await poll(results, cursor)
    third, _ = await poll(results, cursor, seconds=0)

    assert first == [
        {"state": "finished", "request_id": f"{SESSION}:0", "response_payload_uncompressed_size": 7}
    ]
    assert second == [{"state": "failed", "request_id": f"{SESSION}:1"}]
    assert third == []


async def test_a_poll_waits_for_the_next_sample() -> None:
    results = a_store()
    results.open(f"{SESSION}:3", b"", "me")
    polling = asyncio.create_task(poll(results))
    await asyncio.sleep(0)
    assert not polling.done()

    results.finish(f"{SESSION}:3", Result(b"x", PROTOBUF))

    completions, _ = await polling
    assert [entry["request_id"] for entry in completions] == [f"{SESSION}:3"]


async def test_clients_of_one_sampling_session_see_their_own_samples() -> None:
    results = a_store()
    sample(results, 0)
    theirs = sample(results, 5 * CLIENT_NUMBERS + 1)

    completions, _ = await poll(results, client=5)

    assert [entry["request_id"] for entry in completions] == [theirs]


async def test_a_sample_that_was_evicted_unread_is_reported_nevertheless() -> None:
    results = a_store(max_bytes=10)
    sample(results, 0, size=8)
    _, cursor = await poll(results)
    evicted = sample(results, 1, size=8)
    sample(results, 2, size=8)

    completions, cursor = await poll(results, cursor)
    again, _ = await poll(results, cursor, seconds=0)

    assert results.digest(evicted) is None
    assert evicted in [entry["request_id"] for entry in completions]
    assert again == []


async def test_a_client_of_a_head_that_is_gone_retrieves_all_of_its_samples() -> None:
    before, after = a_store(), a_store()
    sample(before, 5000)
    _, cursor = await poll(before)
    for seq_id in (5001, 5002):
        before.open(f"{SESSION}:{seq_id}", b"", "me")

    at_after = sample(after, 5003)
    names: list[object] = []
    while True:
        completions, cursor = await poll(after, cursor, seconds=0)
        if not completions:
            break
        assert len(completions) <= 512
        names += [entry["request_id"] for entry in completions]

    assert {*names} == {f"{SESSION}:{number}" for number in range(4096 + 1024 + 4096)}
    assert len(names) == len({*names}) + 1, "what this head completed is reported once more"
    assert names[-1] == at_after


@pytest.mark.parametrize("cursor", [1 << 62, (1 << 63) - 1, 512, 1 << 27, (1 << 48) - 1])
async def test_an_answer_to_a_made_up_cursor_is_short_and_leads_to_a_valid_one(
    cursor: int,
) -> None:
    results = a_store()
    sample(results, 0)

    sizes = []
    for _ in range(30):
        completions, cursor = await poll(results, cursor, seconds=0)
        sizes.append(len(completions))

    assert max(sizes) <= 512
    assert sizes[-1] == 0


async def test_a_first_poll_at_a_head_without_samples_of_the_client_is_answered_likewise() -> None:
    completions, _ = await poll(a_store())

    assert f"{SESSION}:0" in {entry["request_id"] for entry in completions}


async def test_results_that_were_retrieved_are_dropped_when_the_client_says_so() -> None:
    results = a_store()
    read, unread = sample(results, 0), sample(results, 1)
    await results.wait(read, 1)

    results.acknowledge(SESSION, [read, unread, "other:sample:0:0"])

    assert results.digest(read) is None
    assert results.digest(unread) is not None


async def test_polls_end_when_the_head_stops() -> None:
    results = a_store()
    results.open(f"{SESSION}:0", b"", "me")
    polling = asyncio.create_task(poll(results))
    await asyncio.sleep(0)

    results.release()

    assert (await polling)[0] == []


async def test_a_large_result_is_announced_and_stays_unread() -> None:
    results = a_store()
    name = sample(results, 0, size=100)

    announced = await results.wait(name, 1, max_bytes=99)
    assert announced is not None
    assert orjson.loads(announced.body) == {
        "status": "complete_metadata",
        "response_payload_size": 100,
    }
    assert not results.was_read(name)
    whole = await results.wait(name, 1, max_bytes=100)
    assert whole is not None
    assert len(whole.body) == 100


@pytest.mark.parametrize("latest", [0, 1023, 1024, 70_000])
def test_a_cursor_keeps_its_parts(latest: int) -> None:
    cursor = Cursor(epoch=7, latest=latest, event=99)

    assert Cursor.parse(int(cursor)) == Cursor(7, latest - latest % 1024, 99)
    assert int(cursor) < 1 << 63
