"""A way to the API server that fails when told to, and kills whoever uses it.

A client that is given `kubeconfig` speaks plain HTTP to a port of this machine. What it says goes
on to the real API server with its own token, and what that answers comes back, watches included,
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

from tinkercloud_testing.cluster.certificates import write_kubeconfig
from tinkercloud_testing.servers import free_port

Forward = Callable[[], Awaitable[web.StreamResponse]]
Fault = Callable[[web.BaseRequest, Forward], Awaitable[web.StreamResponse]]
"""Answers a request, asking the API server or not."""

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
"""Renewals of a Lease, what is said for people to read, and sums that are gathered for seconds."""


@dataclass(frozen=True)
class Write:
    """A write that the API server has answered."""

    verb: str
    path: str
    status: int


@dataclass
class Trap:
    """Springs at the n-th write from now on, unless it is disarmed before."""

    writes_left: int
    moment: str
    """`asked`: before the API server sees the write; `answered`: after it has answered."""
    spring: Callable[[], None]
    """Kills who made the write; it never sees the answer."""
    has_sprung: bool = False
    _is_armed: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def springs(self, moment: str) -> bool:
        """Count a write's moment, and say whether the trap springs at it."""
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
        """Let it spring no more; return whether it has."""
        with self._lock:
            self._is_armed = False
            return self.has_sprung


@dataclass
class FaultyApi:
    """The way to one API server."""

    url: str
    """The API server's own."""
    kubeconfig: Path
    """Leads here, with the client's credentials."""
    writes: list[Write] = field(default_factory=list)
    """Those that count, in the order of their answers."""
    fault: Fault | None = None
    trap: Trap | None = None
    """Set and taken away by tests."""
    is_mute: bool = False
    """Whether what watches bring is swallowed."""
    writes_under_way: int = 0
    """Of those that count: asked and not answered yet, or what a trap does about them not done."""
    _watches: set[asyncio.Task[object]] = field(default_factory=set)

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Answer by a fault for the length of a block; watches that are open then are broken."""
        self.fault = fault
        self.cut_watches()
        try:
            yield
        finally:
            self.fault = None

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Let watches bring nothing for the length of a block; what they would have is lost."""
        self.is_mute = True
        try:
            yield
        finally:
            self.is_mute = False

    def cut_watches(self) -> None:
        """Break the connections of all watches."""
        for watch in tuple(self._watches):
            watch.get_loop().call_soon_threadsafe(watch.cancel)

    async def answer(
        self, request: web.BaseRequest, client: aiohttp.ClientSession
    ) -> web.StreamResponse:
        """Answer one request of the client."""

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
        """Pass on a write that counts, unless its trap springs first."""
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
            # Clients end watches by leaving.
            with contextlib.suppress(ConnectionResetError):
                async for line in answered.content:
                    if not self.is_mute:
                        await response.write(line)
        finally:
            self._watches.discard(task)
        return response


def _nothing(request: web.BaseRequest) -> web.StreamResponse:
    """Break the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def refusing(status: int, **headers: str) -> Fault:
    """Return a fault that answers everything with a status, as an API server would."""

    async def fault(_request: web.BaseRequest, _forward: Forward) -> web.StreamResponse:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(content, status=status, headers=named)

    return fault


def slow(seconds: float) -> Fault:
    """Return a fault that lets everything wait."""

    async def fault(_request: web.BaseRequest, forward: Forward) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await forward()

    return fault


async def expired(request: web.BaseRequest, forward: Forward) -> web.StreamResponse:
    """Tell every watch that the moment it starts from is forgotten (410, in the stream)."""
    if "watch=" not in request.query_string:
        return await forward()
    status = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired"}
    return web.json_response({"type": "ERROR", "object": status})


@contextlib.contextmanager
def a_faulty_api(kubeconfig: Path) -> Iterator[FaultyApi]:
    """Run a way to the API server of a kubeconfig, for the length of a block."""
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
