"""Bare ASGI: bodies as they arrive, encodings, and complete answers."""

from collections.abc import MutableMapping
from random import Random
from typing import Any

import pytest
import zstandard

from tinkercloud_protocol.wire.asgi import (
    Message,
    Request,
    check_encoding,
    decompress,
    error_body,
    respond,
)
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound

SCOPE: MutableMapping[str, Any] = {"method": "POST", "path": "/x", "headers": [(b"a", b"\xe9")]}


def a_request(*messages: Message) -> Request:
    remaining = list(messages)

    async def receive() -> Message:
        return remaining.pop(0)

    return Request(SCOPE, receive)


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_is_read_chunk_by_chunk_without_empty_chunks() -> None:
    request = a_request(part(b"a", more=True), part(b"", more=True), part(b"b", more=False))

    assert [chunk async for chunk in request.chunks()] == [b"a", b"b"]
    assert (request.method, request.path, request.headers) == ("POST", "/x", {"a": "é"})


async def test_a_client_that_disconnects_leaves_an_invalid_request() -> None:
    request = a_request(part(b"a", more=True), {"type": "http.disconnect"})

    with pytest.raises(InvalidRequest, match="disconnected"):
        _chunks = [chunk async for chunk in request.chunks()]


def test_an_encoding_is_accepted_only_if_it_is_listed() -> None:
    check_encoding({})
    check_encoding({"content-encoding": "zstd"}, accepted=("zstd",))

    with pytest.raises(InvalidRequest, match="'zstd' is not supported; use none"):
        check_encoding({"content-encoding": "zstd"})
    with pytest.raises(InvalidRequest, match="use zstd or none"):
        check_encoding({"content-encoding": "br"}, accepted=("zstd",))


def test_the_beginning_of_an_incomplete_zstd_stream_can_be_read() -> None:
    content = Random(0).randbytes(1 << 20)
    compressed = zstandard.compress(content)

    assert decompress(compressed[: 512 << 10], 100) == content[:100]
    assert decompress(compressed, 10**9) == content


def test_a_body_that_is_not_zstd_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        decompress(b"not compressed", 100)


async def test_an_answer_has_its_length_and_the_headers_of_the_caller() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await respond(send, error_body(NotFound("no such run")), status=404, headers={"x": "y"})

    start, body = sent
    assert body["body"] == b'{"detail":"no such run"}'
    assert start["status"] == 404
    assert (b"content-length", b"24") in start["headers"]
    assert (b"x", b"y") in start["headers"]
