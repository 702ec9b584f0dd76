"""Connections to heads are kept for the next request, unless something of the last is left."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tinkercloud_api import head_client
from tinkercloud_api.head_client import HeadClient, HeadUnreachable
from tinkercloud_testing.waiting import wait_until

ANSWER = b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nok"


class Head:
    """A server that answers each request line it reads, and counts its connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.read = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            refused = b"/refused" in head
            if not refused:
                self.read += await reader.readexactly(4)
            writer.write(ANSWER % (413 if refused else 200))


async def post(
    client: HeadClient, url: str, body: bytes | AsyncIterator[bytes], silence_seconds: float = 30
) -> int:
    headers = [] if isinstance(body, bytes) else [(b"content-length", b"8")]
    async with await client.post(url, headers, body, silence_seconds=silence_seconds) as response:
        assert b"".join([chunk async for chunk in response.chunks()]) == b"ok"
        return response.status


async def test_a_connection_is_used_again() -> None:
    head, client = Head(), HeadClient()
    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"

        statuses = [await post(client, url, b"abcd"), await post(client, url, b"efgh")]

        client.close()
    assert (statuses, head.connections, head.read) == ([200, 200], 1, b"abcdefgh")


async def test_a_connection_with_half_a_body_on_it_is_not_used_again() -> None:
    head, client = Head(), HeadClient()
    answered = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        await answered.wait()
        yield b"rest"

    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asyncio.get_running_loop().call_later(0.2, answered.set)

        refused = await post(client, f"{url}/refused", half())
        accepted = await post(client, f"{url}/fine", b"abcd")

        client.close()
    assert (refused, accepted, head.connections, head.read) == (413, 200, 2, b"abcd")


def a_silent_head() -> socket.socket:
    """A machine that vanished: connections are made by its address, and nothing ever answers."""
    return socket.create_server(("127.0.0.1", 0))


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(1 << 20)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_head_that_is_silent_is_given_up(streams: bool) -> None:
    client = HeadClient()
    with a_silent_head() as head:
        url = f"http://127.0.0.1:{head.getsockname()[1]}/poll"

        with pytest.raises(HeadUnreachable, match=r"was silent for 0.1 s"):
            await post(client, url, endless() if streams else b"abcd", silence_seconds=0.1)

    assert client.num_idle == 0


async def test_the_time_a_client_takes_to_send_is_not_a_heads_silence() -> None:
    head, client = Head(), HeadClient()

    async def slow() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(1.0)

    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        headers = [(b"content-length", b"4")]
        async with await client.post(url, headers, slow(), silence_seconds=0.5) as response:
            assert response.status == 200
        client.close()


async def test_a_machine_that_is_gone_is_given_up_before_it_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_client, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # With its queue full, the system drops what else wants to connect.
        queued = [socket.socket() for _ in range(4)]
        for one in queued:
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        with pytest.raises(HeadUnreachable, match=r"no answer in 0.1 s"):
            await post(HeadClient(), f"http://127.0.0.1:{full.getsockname()[1]}/x", b"abcd")

        for one in queued:
            one.close()


async def test_connections_notice_when_the_machine_of_a_head_vanishes() -> None:
    head, client = Head(), HeadClient()

    async with await asyncio.start_server(head.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        await post(client, url, b"abcd")
        (connection,) = next(iter(client._idle.values()))
        assert connection._transport is not None
        made = connection._transport.get_extra_info("socket")
        options = [
            made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
        ]
        client.close()
    assert options == [1, 10]


async def test_connections_and_addresses_of_heads_that_are_gone_are_not_kept() -> None:
    client, open_ends = HeadClient(), set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.add(writer)
        await reader.readexactly(1)
        writer.write(ANSWER % 200)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/fine"
        await asyncio.gather(*[post(client, url, b"abcd") for _ in range(20)])
        assert client.num_idle == 20
        for writer in open_ends:
            writer.close()
        await asyncio.to_thread(wait_until, lambda: client.num_idle == 0, "no connection is kept")

    assert client._idle == {}
