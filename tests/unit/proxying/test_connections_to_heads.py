"""Connections to heads are kept for the next request, unless something of the last is left."""

import asyncio
from collections.abc import AsyncIterator

from tinkercloud_api.head_client import HeadClient

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


async def post(client: HeadClient, url: str, body: bytes | AsyncIterator[bytes]) -> int:
    headers = [] if isinstance(body, bytes) else [(b"content-length", b"8")]
    async with await client.post(url, headers, body) as response:
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
