"""Forwarded requests are counted by owner, and those that fail because of the head by reason."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tinkercloud_api.heads.proxy import Proxy, StaleEndpoint
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.providers.head_http_client import HeadUnreachable, open_client
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.harness.ports import free_port


async def nowhere(_message: MutableMapping[str, Any]) -> None: ...


async def forward(port: int) -> None:
    endpoint = HeadEndpoint(f"http://127.0.0.1:{port}", "token", "g1")
    async with open_client() as session:
        await Proxy(session).forward(
            nowhere,
            endpoint,
            "/x",
            target="run",
            owner="ann",
            headers={},
            body=b"{}",
            timeout_seconds=30,
        )


def in_flight(owner: str) -> float | None:
    return REGISTRY.get_sample_value("tinkercloud_proxy_requests_in_flight", {"owner": owner})


async def forward_to_one_that_answers(answer: bytes) -> float | None:
    """Forward a request; return how many of its owner were in flight while the head had it."""
    at_the_head: list[float | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        at_the_head.append(in_flight("ann"))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await forward(server.sockets[0].getsockname()[1])
    (count,) = at_the_head
    return count


def counted(reason: str) -> float:
    value = REGISTRY.get_sample_value("tinkercloud_proxy_errors_total", {"reason": reason})
    assert value is not None
    return value


async def test_a_head_that_cannot_be_reached_is_counted() -> None:
    before = counted("unreachable")

    with pytest.raises(Unavailable):
        await forward(free_port())

    assert counted("unreachable") == before + 1


async def test_an_interrupted_response_is_counted() -> None:
    before = counted("broke_off")

    with pytest.raises(HeadUnreachable):
        await forward_to_one_that_answers(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")

    assert counted("broke_off") == before + 1


async def test_a_head_that_was_replaced_is_counted() -> None:
    before = counted("replaced")
    refusal = f"HTTP/1.1 {routes.WRONG_GENERATION_STATUS} X\r\ncontent-length: 0\r\n\r\n"

    with pytest.raises(StaleEndpoint):
        await forward_to_one_that_answers(refusal.encode())

    assert counted("replaced") == before + 1


async def test_a_request_is_in_flight_for_its_owner_until_its_response_is_complete() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    assert await forward_to_one_that_answers(whole) == 1
    assert in_flight("ann") == 0
