"""Bytes that are hardly HTTP: connections end, with a 4xx or without a response."""

import socket

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.servers import API_KEY, Server

_LINES = st.sampled_from(
    [
        b"POST /api/v1/forward_backward HTTP/1.1",
        b"POST /api/v1/asample HTTP/1.1",
        b"GET /api/v1/sessions HTTP/1.1",
        b"GET /%00/../healthz HTTP/1.1",
        b"GET http://elsewhere/healthz HTTP/1.0",
        b"PRI * HTTP/2.0",
        b"OPTIONS * HTTP/1.1",
        b"POST  HTTP/9.9",
    ]
) | st.binary(max_size=30)
_FIELDS = st.sampled_from(
    [
        b"Host: here",
        b"Host: here\r\nHost: there",
        b"X-API-Key: " + API_KEY.encode(),
        b"Content-Type: application/x-protobuf",
        b"Content-Type: application/json",
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: gzip",
        b"Content-Encoding: gzip",
        b"Content-Encoding: br",
        b"Expect: 100-continue",
        b"Connection: Upgrade\r\nUpgrade: websocket",
        b" continued: of nothing",
        b"Accept: \xff\xfe",
        b": nameless",
    ]
) | st.binary(max_size=20)
_BODIES = st.sampled_from(
    [
        b"",
        b"hello",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;a=b\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
        b"-5\r\nhello\r\n",
        b"ffffffffffffffff\r\n",
        b"\x1f\x8b\x08" + bytes(20),
        b"{" * 100,
    ]
) | st.binary(max_size=60)


def test_no_bytes_on_a_connection_make_the_server_fail_or_hold_it_open(
    server: Server, cases: Cases
) -> None:
    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(line=_LINES, fields=st.lists(_FIELDS, max_size=5), body=_BODIES)
    def check(line: bytes, fields: list[bytes], body: bytes) -> None:
        head = b"\r\n".join([line, *fields, b"Connection: close", b"", b""])
        for status in _statuses(_exchange(server, head + body)):
            assert status < 500, (status, head, body)
        cases.count()

    check()


def _exchange(server: Server, sent: bytes) -> bytes:
    """Send bytes, end the sending direction, and return all that comes until the other ends."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionError:  # it may be reset, but not stay open
            pass
    return bytes(received)


def _statuses(received: bytes) -> list[int]:
    """Return the statuses of the responses."""
    starts = [part for part in received.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
    return [int(part[:3]) for part in starts]
