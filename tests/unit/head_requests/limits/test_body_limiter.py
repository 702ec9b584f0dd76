"""Large bodies of one owner are parsed one after another, concurrently with other owners."""

import asyncio
import threading
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.launch import Limits
from tinkercloud_protocol.requests.sampling_requests import SampleRequest, parse_sample
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.served_heads import a_served_head
from tinkercloud_worker.head.serve import head_app
from tinkercloud_worker.head.wire.body_limiter import BodyLimiter


class Readers:
    """Bodies that are parsed until `end` is called."""

    def __init__(self, max_bytes: int) -> None:
        self.limiter = BodyLimiter(max_bytes)
        self.reading: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, owner: str, size: int) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._read(name, owner, size))
        await settled()

    async def _read(self, name: str, owner: str, size: int) -> None:
        async with self.limiter.reserve(owner, size):
            self.reading.append(name)
            await self.ends[name].wait()
            self.reading.remove(name)

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_bodies_wait_in_order_until_their_owner_has_room() -> None:
    readers = Readers(max_bytes=10)
    for name, size in (("a", 6), ("b", 6), ("c", 1)):
        await readers.begin(name, "eve", size)
    await readers.begin("d", "bob", 10)

    assert readers.reading == ["a", "d"]
    await readers.end("a")
    assert readers.reading == ["d", "b", "c"]


async def test_a_body_larger_than_the_limit_is_parsed_alone() -> None:
    readers = Readers(max_bytes=10)
    await readers.begin("a", "eve", 1)
    await readers.begin("large", "eve", 1000)

    assert readers.reading == ["a"]
    await readers.end("a")
    assert readers.reading == ["large"]
    await readers.end("large")


@pytest.mark.parametrize("cancelled", ["running", "first", "second"])
async def test_a_cancelled_body_releases_its_reservation(cancelled: str) -> None:
    readers = Readers(max_bytes=10)
    for name in ("running", "first", "second", "third"):
        await readers.begin(name, "eve", 10)
    order = [name for name in ("running", "first", "second", "third") if name != cancelled]

    await readers.cancel(cancelled)
    if cancelled == "running":
        readers.reading.remove("running")

    for name in order:
        assert readers.reading == [name]
        await readers.end(name)


async def test_a_body_cancelled_on_admission_releases_its_reservation() -> None:
    readers = Readers(max_bytes=10)
    for name in ("running", "first", "second"):
        await readers.begin(name, "eve", 10)

    readers.ends["running"].set()
    # The running one ends in the next iteration of the loop, the first would start after that.
    await asyncio.sleep(0)
    assert readers.reading == []
    await readers.cancel("first")

    assert readers.reading == ["second"]
    await readers.end("second")


async def test_large_bodies_of_one_owner_do_not_block_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    may_end = threading.Event()

    def held(body: bytes) -> SampleRequest:
        request = parse_sample(body)
        started.append(f"{request.sampling_session_id} {request.seq_id}")
        may_end.wait()
        return request

    monkeypatch.setattr(head_app, "parse_sample", held)
    async with a_served_head(tmp_path, Limits(max_body_bytes=200_000)) as head:
        for owner in ("eve", "bob"):
            await head.sampler(f"{owner}:sample:0", owner)

        async def send(owner: str, seq_id: int) -> int:
            session = f"{owner}:sample:0"
            body = {
                "sampling_session_id": session,
                "seq_id": seq_id,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                "sampling_params": {"max_tokens": 1},
                "padding": "x" * 150_000,
            }
            return (await head.send(routes.ASAMPLE, orjson.dumps(body), session)).status

        sent = [asyncio.create_task(send("eve", seq_id)) for seq_id in range(3)]
        await asyncio.to_thread(wait_until, lambda: len(started) == 1, "one of eve's is read")
        sent.append(asyncio.create_task(send("bob", 0)))
        await asyncio.to_thread(wait_until, lambda: len(started) == 2, "bob's is read")

        assert [name.split(":")[0] for name in started] == ["eve", "bob"]
        may_end.set()
        assert await asyncio.gather(*sent) == [200] * 4
