"""A client without a key can occupy only few bytes of the server, for a short time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from tinkercloud_api.web import connections
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send, respond
from tinkercloud_testing.harness.waiting import wait_until

App = Callable[[Scope, Receive, Send], Awaitable[None]]
BEGIN = b"GET /x HTTP/1.1\r\nhost: a\r\n"
FINE = BEGIN + b"\r\n"


async def responds_at_once(_scope: Scope, _receive: Receive, send: Send) -> None:
    await respond(send, b'"fine"')


async def reads_first(_scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive()).get("more_body"):
        pass
    await respond(send, b'"%s"' % message["type"].encode())


@asynccontextmanager
async def served(app: App, bound: int = 100) -> AsyncIterator[int]:
    """Serve an application and yield the port."""
    config = uvicorn.Config(
        app, http=connections.bounded(bound), ws="none", log_config=None, lifespan="off", port=0
    )
    server = uvicorn.Server(config)
    config.load()
    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(wait_until, lambda: server.started, "the server")
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def send_raw(port: int, *parts: bytes) -> bytes:
    """Send bytes, and return everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0)
    received = b""
    with suppress(ConnectionResetError):
        while chunk := await reader.read(1 << 16):
            received += chunk
    writer.close()
    return received


async def send_megabytes(writer: asyncio.StreamWriter, count: int) -> None:
    """Send far more data than socket buffers hold."""
    for _ in range(count):
        writer.write(b"a" * (1 << 20))
        await writer.drain()


async def test_endless_headers_are_cut_off_at_the_limit() -> None:
    async with served(responds_at_once) as port:
        received = await send_raw(port, BEGIN + b"x: ", b"a" * connections.MAX_HEAD_BYTES)

    assert received.startswith(b"HTTP/1.1 431 ")
    assert b"65536 bytes are accepted" in received


async def test_a_header_of_megabytes_is_not_buffered() -> None:
    async with served(responds_at_once) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BEGIN + b"x: ")
        with pytest.raises(ConnectionError):
            await send_megabytes(writer, 200)
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"a" * 65_530 + b"\r\n", b"x: y\r\n" * 101],
    ids=["too long", "too many"],
)
async def test_complete_headers_over_a_limit_are_rejected(headers: bytes) -> None:
    async with served(responds_at_once) as port:
        received = await send_raw(port, BEGIN + headers + b"\r\n")

    assert received.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in received


async def test_the_limit_applies_to_each_request_of_a_connection() -> None:
    request = BEGIN + b"x: " + b"a" * 40_000 + b"\r\n\r\n"
    async with served(responds_at_once) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(request)
            assert (await reader.readuntil(b'"fine"')).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET", BEGIN], ids=["nothing", "a word", "incomplete"])
async def test_a_connection_without_a_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    async with served(responds_at_once) as port:
        assert await send_raw(port, sent) == b""


async def test_incomplete_headers_after_a_complete_request_are_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    async with served(responds_at_once) as port:
        assert (await send_raw(port, FINE, BEGIN)).count(b"fine") == 1


async def test_a_stalled_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_IDLE_SECONDS", 0.05)
    ended = asyncio.Event()

    async def reads(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async with served(reads) as port:
        assert await send_raw(port, BEGIN + b"content-length: 9\r\n\r\nhalf") == b""
        await ended.wait()


async def test_a_body_that_the_server_is_not_reading_yet_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "BODY_IDLE_SECONDS", 0.05)
    size = 4 << 20

    async def reads_late(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await reads_first(scope, receive, send)

    async with served(reads_late) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BEGIN + b"content-length: %d\r\n\r\n" % size + bytes(size))
        assert b"http.request" in await reader.readuntil(b'"http.request"')
        writer.close()


async def test_a_body_whose_reading_resumes_just_before_a_check_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[Callable[[], None]] = []
    checked = asyncio.Event()
    check = connections.BoundedProtocol._check_body

    def note(protocol: connections.BoundedProtocol) -> None:
        checks.append(lambda: check(protocol))
        check(protocol)
        checked.set()

    monkeypatch.setattr(connections, "BODY_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(connections.BoundedProtocol, "_check_body", note)
    size = 4 << 20

    async def resumes_before_a_check(scope: Scope, receive: Receive, send: Send) -> None:
        await checked.wait()
        time.sleep(0.6)
        reading = asyncio.ensure_future(receive())
        asyncio.get_running_loop().call_soon(checks[-1])
        await reading
        await reads_first(scope, receive, send)

    async with served(resumes_before_a_check) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BEGIN + b"content-length: %d\r\n\r\n" % size + bytes(size))
        assert b"http.request" in await reader.readuntil(b'"http.request"')
        writer.close()


async def test_a_response_may_take_longer_than_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "BODY_IDLE_SECONDS", 0.5)

    async def responds_late(scope: Scope, receive: Receive, send: Send) -> None:
        await reads_first(scope, receive, send)
        await asyncio.sleep(0.5)

    async with served(responds_late) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BEGIN + b"content-length: 4\r\n\r\nbody")
        assert b" 200 " in await reader.readuntil(b'"http.request"')
        writer.close()


async def test_connections_over_the_limit_are_rejected_and_the_others_served() -> None:
    async with served(responds_at_once, bound=20) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, writer in held:
            writer.write(FINE)
            await reader.readuntil(b'"fine"')

        refused = await send_raw(port, FINE)
        reader, writer = held[0]
        writer.write(FINE)
        served_on = await reader.readuntil(b"fine")

        for _, writer in held:
            writer.close()
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused
    assert served_on.startswith(b"HTTP/1.1 200 ")


async def test_connections_far_over_the_limit_are_closed_without_a_response() -> None:
    async with served(responds_at_once, bound=10) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(11)]

        assert await send_raw(port, FINE) == b""

        for _, writer in held:
            writer.close()


def test_the_default_limit_reserves_a_head_connection_for_each_client_connection() -> None:
    assert connections.default_bound(1024) == 384
    assert connections.default_bound(65_536) == 32_640
