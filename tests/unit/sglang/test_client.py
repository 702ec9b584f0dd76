"""Calls to one inference server: concurrency, timeouts and aborts."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tinkercloud_worker.inference.client import InferenceClient, ServerUnreachable


class Server:
    """Responds to `/generate` only when released, and to all else immediately."""

    def __init__(self) -> None:
        self.url = ""
        self.generating = 0
        self.has_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/generate":
            self.generating += 1
            self.has_asked.set()
            await self.may_answer.wait()
        return web.json_response({"path": request.path})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", running.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    running.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield running
    running.may_answer.set()
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[InferenceClient]:
    """A client with at most two concurrent `generate` calls."""
    made = InferenceClient(server.url, key=None, max_concurrent=2)
    yield made
    await made.close()


async def test_loading_weights_does_not_wait_for_generate_calls(
    server: Server, client: InferenceClient
) -> None:
    calls = [asyncio.create_task(client.generate("/generate", {})) for _ in range(8)]
    await server.has_asked.wait()

    loaded = await client.post("/load_lora_adapter", {}, seconds=60)

    assert loaded == {"path": "/load_lora_adapter"}
    assert not any(call.done() for call in calls)
    assert server.generating <= 2
    server.may_answer.set()
    assert await asyncio.gather(*calls) == [{"path": "/generate"}] * 8


async def test_aborted_calls_fail_with_the_reason_including_waiting_ones(
    server: Server, client: InferenceClient
) -> None:
    calls = [asyncio.create_task(client.generate("/generate", {})) for _ in range(8)]
    await server.has_asked.wait()

    client.abort_calls("the server is lost")
    ended = await asyncio.gather(*calls, return_exceptions=True)

    assert [repr(error) for error in ended] == [repr(ServerUnreachable("the server is lost"))] * 8
    server.may_answer.set()
    assert await client.generate("/generate", {}) == {"path": "/generate"}


async def test_a_call_that_times_out_reports_its_timeout(
    client: InferenceClient,
) -> None:
    with pytest.raises(ServerUnreachable, match="does not respond: no response within 0 s"):
        await client.post("/generate", {}, seconds=0.01)


async def test_connections_to_a_dead_machine_break_within_a_minute(
    server: Server, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    connect = asyncio.get_running_loop().sock_connect

    async def connecting(sock: socket.socket, address: tuple[str, int]) -> None:
        made.append(sock)
        await connect(sock, address)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connecting)
    call = asyncio.create_task(client.generate("/generate", {}))
    await server.has_asked.wait()

    [connection] = made
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    silent, between, asked = (
        connection.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert silent + between * asked <= 60
    server.may_answer.set()
    await call
