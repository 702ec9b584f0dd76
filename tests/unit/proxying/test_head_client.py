"""Connections to heads are reused, unless a request or response on them was incomplete."""

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tinkercloud_api.providers import head_http_client
from tinkercloud_api.providers.head_http_client import HeadUnreachable, open_client
from tinkercloud_protocol.wire.errors import InvalidRequest

ANSWER = b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nok"


class Head:
    """A server that responds to each request line and counts its connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.read = b""
        self.headers: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            self.headers = head.split(b"\r\n")[1:-2]
            refused = b"/refused" in head
            if not refused:
                self.read += await reader.readexactly(4)
            writer.write(ANSWER % (413 if refused else 200))


async def post(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | AsyncIterator[bytes],
    timeout_seconds: float = 30,
) -> int:
    async with head_http_client.post(
        session, url, {}, body, timeout_seconds=timeout_seconds
    ) as response:
        assert b"".join([chunk async for chunk in response.chunks]) == b"ok"
        return response.status


async def test_a_connection_is_reused() -> None:
    head = Head()
    async with (
        await asyncio.start_server(head.serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"

        statuses = [await post(session, url, b"abcd"), await post(session, url, b"efgh")]

    assert (statuses, head.connections, head.read) == ([200, 200], 1, b"abcdefgh")


async def test_no_headers_are_added_to_requests_to_heads() -> None:
    head = Head()
    async with (
        await asyncio.start_server(head.serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        await post(session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", b"abcd")

    names = {line.split(b":")[0].lower() for line in head.headers}
    assert names == {b"host", b"content-length"}


async def test_a_connection_with_an_incomplete_body_is_not_reused() -> None:
    head = Head()
    answered = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        await answered.wait()
        yield b"rest"

    async with (
        await asyncio.start_server(head.serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        refused = await post(session, f"{url}/refused", half())
        accepted = await post(session, f"{url}/fine", b"abcd")

    assert (refused, accepted, head.connections, head.read) == (413, 200, 2, b"abcd")


async def test_a_body_is_no_longer_read_after_its_request() -> None:
    asked = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"half"
        asked.set()
        await asyncio.Event().wait()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asked.wait()
        writer.write(ANSWER % 413)

    body = endless()
    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await post(session, url, body) == 413
        with pytest.raises(StopAsyncIteration):
            await anext(body)


async def test_an_error_in_the_request_body_is_not_attributed_to_the_head() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise InvalidRequest("the client hung up")

    head = Head()
    async with (
        await asyncio.start_server(head.serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        with pytest.raises(InvalidRequest, match="the client hung up"):
            async with head_http_client.post(session, url, {}, broken(), timeout_seconds=30):
                pytest.fail("the head answered half a request")


def a_silent_head() -> socket.socket:
    """The address of a vanished machine, which never responds."""
    return socket.create_server(("127.0.0.1", 0))


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(1 << 20)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_head_that_does_not_respond_times_out(streams: bool) -> None:
    with a_silent_head() as head:
        url = f"http://127.0.0.1:{head.getsockname()[1]}/poll"

        async with open_client() as session:
            with pytest.raises(HeadUnreachable, match=r"did not respond within 0.1 s"):
                await post(session, url, endless() if streams else b"abcd", timeout_seconds=0.1)


async def test_a_head_that_stalls_in_the_middle_of_its_response_times_out() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"abcd")
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\nhalf")

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(HeadUnreachable, match="in the middle of its response"):
            await post(session, url, b"abcd", timeout_seconds=0.1)


async def test_the_time_a_client_takes_to_send_does_not_count_towards_the_timeout() -> None:
    head = Head()

    async def slow() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(1.0)

    async with (
        await asyncio.start_server(head.serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        length = {"content-length": "4"}
        async with head_http_client.post(
            session, url, length, slow(), timeout_seconds=0.5
        ) as response:
            assert response.status == 200


async def test_connecting_to_an_unreachable_machine_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_http_client, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # The system drops further connections while the accept queue is full.
        queued = [socket.socket() for _ in range(4)]
        for one in queued:
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        async with open_client() as session:
            with pytest.raises(HeadUnreachable, match=r"no connection within 0.1 s"):
                await post(session, f"http://127.0.0.1:{full.getsockname()[1]}/x", b"abcd")

        for one in queued:
            one.close()


async def test_connections_detect_a_dead_machine() -> None:
    async with open_client() as session:
        connector = session.connector
        assert isinstance(connector, aiohttp.TCPConnector)
        make = connector._socket_factory
        assert make is not None
        with make((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))) as made:
            options = [
                made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            ]
    assert options == [1, 10]


async def test_connections_closed_by_a_head_are_not_reused() -> None:
    open_ends = list[asyncio.StreamWriter]()
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.append(writer)
        while await reader.readuntil(b"abcd"):
            writer.write(ANSWER % 200)

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        open_client() as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        await asyncio.gather(*[post(session, url, b"abcd") for _ in range(20)])
        for writer in open_ends:
            writer.close()
            await writer.wait_closed()
        asyncio.get_running_loop().call_soon(closed.set)
        await closed.wait()

        assert await post(session, url, b"abcd") == 200
