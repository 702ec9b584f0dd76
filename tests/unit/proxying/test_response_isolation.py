"""A request gets its own complete response or an error, whatever happened to earlier requests."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import pytest

from tinkercloud_api.providers import head_http_client
from tinkercloud_api.providers.head_http_client import HeadResponse, HeadUnreachable, open_client

KIB = 1 << 10
SIZES = (
    0,
    1,
    64 * KIB,
    250 * KIB,
    256 * KIB + 1,
    300 * KIB,
    600 * KIB,
    KIB**2,
    3 * KIB**2,
    8 * KIB**2,
)
ANSWERS = ("whole", "chunked", "half_closes", "hangs_up", "refuses", "breaks_off", "resets")
ENDS_EARLY = {"breaks_off", "resets"}
SAYS_IT_CLOSES = {"half_closes", "refuses"}
READERS = ("fast", "slow", "late", "leaves", "cancelled")
REQUESTS_AT_ONCE = 4
SILENCE_SECONDS = 120
"""Timeout that is longer than a whole test."""


@dataclass(frozen=True)
class Case:
    """A request, and how its connection behaves."""

    number: int
    size: int
    answer: str
    reader: str
    streams: bool

    @property
    def content(self) -> bytes:
        return bytes([self.number % 251]) * self.size

    @property
    def body(self) -> bytes:
        return b"%08d" % self.number * 1000


def cases(seed: int, count: int) -> list[Case]:
    chance = random.Random(seed)
    return [
        Case(
            number,
            chance.choice(SIZES),
            chance.choice(ANSWERS),
            chance.choice(READERS),
            streams=chance.random() < 0.5,
        )
        for number in range(count)
    ]


class Head:
    """Responds to each request as its path specifies, on the raw socket."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                case = self._cases[int(head.split(b" ")[1][1:])]
                if case.answer != "refuses":
                    await _read_body(reader, head, case)
                if not await _answer(writer, case):
                    break
        writer.close()


async def _read_body(reader: asyncio.StreamReader, head: bytes, case: Case) -> None:
    if b"transfer-encoding: chunked" in head.lower():
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(len(case.body))
    assert body == case.body


async def _answer(writer: asyncio.StreamWriter, case: Case) -> bool:
    """Respond, and return whether the connection stays open."""
    status = b"413" if case.answer == "refuses" else b"200"
    writer.write(b"HTTP/1.1 %b X\r\nx-number: %d\r\n" % (status, case.number))
    content = case.content
    if case.answer in SAYS_IT_CLOSES:
        writer.write(b"connection: close\r\n")
    if case.answer == "chunked":
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for begin in range(0, len(content), 100_000):
            part = content[begin : begin + 100_000]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True
    promised = len(content) + (case.answer in ENDS_EARLY)
    writer.write(b"content-length: %d\r\n\r\n%b" % (promised, content))
    if case.answer == "resets":
        writer.transport.abort()
        return False
    if case.answer == "half_closes":
        writer.write_eof()
        return False
    await writer.drain()
    return case.answer == "whole"


async def request(session: aiohttp.ClientSession, url: str, case: Case) -> str:
    """Send a request and return its outcome: "answered", "failed", or "left" by its reader."""
    body = _streamed(case.body) if case.streams else case.body
    try:
        async with head_http_client.post(
            session, f"{url}/{case.number}", {}, body, timeout_seconds=SILENCE_SECONDS
        ) as response:
            assert dict(response.headers)[b"x-number"] == b"%d" % case.number
            return await _read(response, case)
    except HeadUnreachable as error:
        return "silent" if "silent" in str(error) else "failed"


async def _streamed(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), 3000):
        yield body[begin : begin + 3000]
        await asyncio.sleep(0)


async def _read(response: HeadResponse, case: Case) -> str:
    if case.reader == "late":
        await asyncio.sleep(0.02)
    content = b""
    async for chunk in response.chunks:
        content += chunk
        if case.reader == "slow":
            await asyncio.sleep(0.002)
        if case.reader == "leaves":
            return "left"
        if case.reader == "cancelled":
            raise asyncio.CancelledError
    assert content == case.content
    return "answered"


async def outcomes(url: str, cases: Sequence[Case]) -> list[str]:
    """Send all requests, some concurrently, and return their outcomes."""
    waiting = list(enumerate(cases))
    results = [""] * len(cases)

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            index, case = waiting.pop(0)
            try:
                results[index] = await request(session, url, case)
            except asyncio.CancelledError:
                results[index] = "left"

    async with open_client() as session, asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_AT_ONCE):
            group.create_task(work(session))
    return results


def may_come_of(case: Case) -> set[str]:
    """Return the outcomes that a reader may see for its request."""
    reads_all = case.reader in {"fast", "slow", "late"} or case.size == 0
    if case.answer in ENDS_EARLY:
        return {"failed"} if reads_all else {"failed", "left"}
    # A client that is rejected while it is still sending may see the close before the response.
    return {"answered" if reads_all else "left"} | (
        {"failed"} if case.answer == "refuses" else set()
    )


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_gets_its_own_response_in_any_mixture_of_requests(seed: int) -> None:
    mixture = cases(seed, count=60)
    head = Head(mixture)
    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        results = await outcomes(url, mixture)

    unexplained = [
        (case, result)
        for case, result in zip(mixture, results, strict=True)
        if result not in may_come_of(case)
    ]
    # A connection may be closed at the moment when it is reused.
    assert {result for _, result in unexplained} <= {"failed"}, unexplained
    assert len(unexplained) <= sum(case.answer == "hangs_up" for case in mixture), unexplained
    assert head.connections < len(mixture)


@pytest.mark.parametrize("size", [270 * KIB, 300 * KIB, 400 * KIB, 600 * KIB, 4 * KIB**2])
async def test_the_request_after_a_large_response_succeeds(size: int) -> None:
    pair = [
        Case(0, size, "whole", "fast", streams=False),
        Case(1, 2, "whole", "fast", streams=False),
    ]
    head = Head(pair)
    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_client() as session:
            results = [await request(session, url, case) for case in pair]

    assert (results, head.connections) == (["answered", "answered"], 1)
