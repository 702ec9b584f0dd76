"""Requests that the API server rejects are sent to the head only for their sequence position."""

import asyncio
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import aiohttp
import orjson
import pytest

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.access.roles import Role
from tinkercloud_api.context import Context
from tinkercloud_api.heads.proxy import Proxy
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.routes.requests.call import Call
from tinkercloud_api.serve.hot_routes import routes_at
from tinkercloud_api.web.asgi_http import HotRequest
from tinkercloud_api.web.long_polls import LongPolls
from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest, NotFound
from tinkercloud_worker.head.order import requests

MODEL = "s:train:0"
OF_ANOTHER = "tinker://other:train:0/weights/x"
WHY = f"checkpoint {OF_ANOTHER} does not exist, or belongs to another owner"


class Server:
    """A server on which the caller has no checkpoints, with one head for all runs."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.settings = SimpleNamespace(
            limits=SimpleNamespace(max_body_bytes=1 << 20), timings=Timings()
        )
        self.activity = SimpleNamespace(touch=lambda _model: None)
        self.checkpoints = self.locator = self.known = self.authenticator = self
        self.proxy = Proxy(session)
        self.tenants = Tenants()
        self.long_polls = LongPolls()
        self._route = HeadEndpoint(f"http://127.0.0.1:{port}", "token", "g1")

    async def manifest(self, *_: object) -> None:
        raise NotFound(WHY)

    async def authorize_run(self, *_: object) -> None: ...

    async def reader(self, caller: Principal, _token: str | None) -> Principal:
        return caller

    def head_at_once(self, _model: str) -> HeadEndpoint:
        return self._route


async def forwarded(path: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """Send a request and return the headers and body that the head receives."""
    reads: list[tuple[dict[str, str], bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}
        reads.append((headers, await reader.readexactly(int(headers["content-length"]))))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(_message: MutableMapping[str, Any]) -> None: ...

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as listening,
        open_client() as session,
    ):
        server = Server(session, listening.sockets[0].getsockname()[1])
        route, scope = (
            routes_at(path).by_method["POST"],
            {"method": "POST", "path": path, "headers": []},
        )
        principal, context = Principal(1, "key", "me", Role.USER), cast("Context", server)
        request = HotRequest(scope, receive, route.limit.max_bytes(context.settings))
        call = Call(context, request, send, principal)
        await route.handler(call)
    return reads[0]


async def test_a_head_without_support_for_rejections_does_not_execute_a_rejected_load() -> None:
    load = {"model_id": MODEL, "seq_id": 3, "path": OF_ANOTHER, "optimizer": True}

    headers, body = await forwarded(routes.LOAD_WEIGHTS, orjson.dumps(load))

    assert unquote(headers[routes.REFUSAL_HEADER]) == WHY
    assert orjson.loads(body) == {"model_id": MODEL, "seq_id": 3}
    with pytest.raises(InvalidRequest, match="path: Field required"):
        requests.read(routes.LOAD_WEIGHTS, body)


@pytest.mark.parametrize(
    "path",
    [
        routes.OPTIM_STEP,
        routes.SAVE_WEIGHTS,
        routes.SAVE_WEIGHTS_FOR_SAMPLER,
        routes.SAVE_WEIGHTS_EXTERNAL,
        routes.LOAD_WEIGHTS,
    ],
)
async def test_an_oversized_request_is_forwarded_as_its_sequence_position_only(path: str) -> None:
    request = {"model_id": MODEL, "seq_id": 3, "user_metadata": {"a": "x" * (1 << 20)}}

    headers, body = await forwarded(path, orjson.dumps(request))

    assert unquote(headers[routes.REFUSAL_HEADER]) == (
        f"request body: larger than {1 << 20} bytes; send less data per request"
    )
    assert orjson.loads(body) == {"model_id": MODEL, "seq_id": 3}


async def test_an_oversized_request_without_a_model_is_rejected_at_once() -> None:
    with pytest.raises(BodyTooLarge):
        await forwarded(routes.SAVE_WEIGHTS, orjson.dumps({"path": "x" * (1 << 20)}))
