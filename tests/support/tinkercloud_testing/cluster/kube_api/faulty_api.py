"""A proxy to the API server that injects faults and kills its client on request.

A client with this `kubeconfig` speaks plain HTTP to a local port. The proxy forwards requests with
the client's own token to the real API server, and responses, including watches, to the client,
until a test sets a fault or a trap.
"""

import asyncio
import base64
import contextlib
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from aiohttp import hdrs, web

from tinkercloud_testing.cluster.kube_api.certificates import write_kubeconfig
from tinkercloud_testing.harness.ports import free_port

Forward = Callable[[], Awaitable[web.StreamResponse]]
Fault = Callable[[web.BaseRequest, Forward], Awaitable[web.StreamResponse]]
"""Responds to a request, and may forward it to the API server."""

_OF_ONE_CONNECTION = frozenset(
    name.lower()
    for name in (
        hdrs.CONNECTION,
        hdrs.CONTENT_ENCODING,
        hdrs.CONTENT_LENGTH,
        hdrs.HOST,
        hdrs.TRANSFER_ENCODING,
    )
)
_UNCOUNTED = re.compile(r"/(leases|events|basemodels)(/|$)")
"""Renewals of Leases, Events, and summaries that are batched for seconds."""


@dataclass(frozen=True)
class Write:
    """A write that the API server has answered."""

    verb: str
    path: str
    status: int


@dataclass
class Trap:
    """Triggers at the n-th write from now on, unless it is disarmed earlier."""

    writes_left: int
    moment: str
    """`asked`: before the API server sees the write; `answered`: after it has answered."""
    spring: Callable[[], None]
    """Kills the client that sent the write, before it receives the response."""
    has_sprung: bool = False
    _is_armed: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def springs(self, moment: str) -> bool:
        """Count a write, and return whether the trap triggers at it."""
        with self._lock:
            if not self._is_armed or moment != self.moment:
                return False
            self.writes_left -= 1
            if self.writes_left > 0:
                return False
            self.spring()
            self._is_armed, self.has_sprung = False, True
            return True

    def disarm(self) -> bool:
        """Disable the trap; return whether it has triggered."""
        with self._lock:
            self._is_armed = False
            return self.has_sprung


@dataclass
class FaultyApi:
    """A proxy to one API server."""

    url: str
    """The URL of the API server."""
    kubeconfig: Path
    """Points to the proxy, with the credentials of the client."""
    writes: list[Write] = field(default_factory=list)
    """The counted writes, in the order of their responses."""
    fault: Fault | None = None
    trap: Trap | None = None
    """Set and cleared by tests."""
    is_mute: bool = False
    """Whether watch events are discarded."""
    writes_under_way: int = 0
    """The number of counted writes without a response, or whose trap is still running."""
    _watches: set[asyncio.Task[object]] = field(default_factory=set)

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Respond with a fault during a block; open watches are disconnected first."""
        self.fault = fault
        self.cut_watches()
        try:
            yield
        finally:
            self.fault = None

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Discard all watch events during a block."""
        self.is_mute = True
        try:
            yield
        finally:
            self.is_mute = False

    def cut_watches(self) -> None:
        """Disconnect all watches."""
        for watch in tuple(self._watches):
            watch.get_loop().call_soon_threadsafe(watch.cancel)

    async def answer(
        self, request: web.BaseRequest, client: aiohttp.ClientSession
    ) -> web.StreamResponse:
        """Respond to a request of the client."""

        async def forward() -> web.StreamResponse:
            try:
                return await self._forward(request, client)
            except aiohttp.ClientError:
                return _nothing(request)

        if self.fault is not None:
            return await self.fault(request, forward)
        return await forward()

    async def _forward(
        self, request: web.BaseRequest, client: aiohttp.ClientSession
    ) -> web.StreamResponse:
        body = await request.read() or None
        if request.method == "GET" or _UNCOUNTED.search(request.path):
            return await self._pass_on(request, client, body)
        self.writes_under_way += 1
        try:
            return await self._write(request, client, body)
        finally:
            self.writes_under_way -= 1

    async def _write(
        self, request: web.BaseRequest, client: aiohttp.ClientSession, body: bytes | None
    ) -> web.StreamResponse:
        """Forward a counted write, unless its trap triggers first."""
        if self._springs("asked"):
            return _nothing(request)
        response = await self._pass_on(request, client, body)
        self.writes.append(Write(request.method, request.path, response.status))
        return _nothing(request) if self._springs("answered") else response

    async def _pass_on(
        self, request: web.BaseRequest, client: aiohttp.ClientSession, body: bytes | None
    ) -> web.StreamResponse:
        async with client.request(
            request.method, self.url + request.raw_path, headers=_passed_on(request), data=body
        ) as answered:
            if "watch=" in request.query_string:
                return await self._stream(request, answered)
            content = await answered.read()
        return web.Response(
            status=answered.status, body=content, content_type=answered.content_type
        )

    def _springs(self, moment: str) -> bool:
        return self.trap is not None and self.trap.springs(moment)

    async def _stream(
        self, request: web.BaseRequest, answered: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answered.status)
        response.content_type = answered.content_type
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            # Clients end watches by disconnecting.
            with contextlib.suppress(ConnectionResetError):
                async for line in answered.content:
                    if not self.is_mute:
                        await response.write(line)
        finally:
            self._watches.discard(task)
        return response


def _nothing(request: web.BaseRequest) -> web.StreamResponse:
    """Close the connection without a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def refusing(status: int, **headers: str) -> Fault:
    """Return a fault that responds to every request with a status, like an API server."""

    async def fault(_request: web.BaseRequest, _forward: Forward) -> web.StreamResponse:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(content, status=status, headers=named)

    return fault


def slow(seconds: float) -> Fault:
    """Return a fault that delays every request."""

    async def fault(_request: web.BaseRequest, forward: Forward) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await forward()

    return fault


async def expired(request: web.BaseRequest, forward: Forward) -> web.StreamResponse:
    """Report to every watch that its resource version has expired (410, in the stream)."""
    if "watch=" not in request.query_string:
        return await forward()
    status = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired"}
    return web.json_response({"type": "ERROR", "object": status})


@contextlib.contextmanager
def a_faulty_api(kubeconfig: Path) -> Iterator[FaultyApi]:
    """Run a proxy to the API server of a kubeconfig during a block."""
    content = yaml.safe_load(kubeconfig.read_text())
    own, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
    port = free_port()
    path = kubeconfig.with_suffix(f".{port}")
    authority = own["certificate-authority-data"]
    write_kubeconfig(path, f"http://127.0.0.1:{port}", authority, user)
    api = FaultyApi(own["server"], path)
    loop = asyncio.new_event_loop()
    stop, started = asyncio.Event(), threading.Event()
    serving = _serve(api, port, authority, started, stop)
    thread = threading.Thread(target=lambda: loop.run_until_complete(serving), daemon=True)
    thread.start()
    started.wait()
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _serve(
    api: FaultyApi, port: int, authority: str, started: threading.Event, stop: asyncio.Event
) -> None:
    tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode())
    unbounded = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(ssl=tls, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=unbounded, read_bufsize=2**24
    ) as client:
        server = web.Server(lambda request: api.answer(request, client))
        runner = web.ServerRunner(server, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()
        await stop.wait()
        api.cut_watches()
        await runner.cleanup()


def _passed_on(request: web.BaseRequest) -> dict[str, str]:
    return {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in _OF_ONE_CONNECTION
    }
