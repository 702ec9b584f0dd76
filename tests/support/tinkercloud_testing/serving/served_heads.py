"""A head with its HTTP API, in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import uvicorn
from starlette.types import ASGIApp

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    Limits,
    ModelSpec,
    SamplerSpec,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_testing.small_models.models import byte_tokenizer, tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.head_app import HeadApp
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.wire.head_token import HeadToken

TOKEN = "known-to-both"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve a head, or an API server, on a free port; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    body: bytes

    @property
    def detail(self) -> str:
        """The error message of a rejected request."""
        return str(orjson.loads(self.body)["detail"])

    @property
    def request_id(self) -> str:
        """The id of an accepted request."""
        assert self.status == 200, self.body
        return str(orjson.loads(self.body)["request_id"])


@dataclass(frozen=True)
class ServedHead:
    """A head, called as an API server calls it."""

    lifecycle: Lifecycle
    backend: Backend
    url: str
    client: aiohttp.ClientSession

    async def send(
        self, path: str, body: bytes, target: str, *, method: str = "POST", **headers: str
    ) -> Answer:
        """Send a request routed to `target`."""
        sent = {routes.HEAD_TOKEN_HEADER: TOKEN, routes.TARGET_HEADER: target, **headers}
        async with self.client.request(method, self.url + path, data=body, headers=sent) as answer:
            return Answer(answer.status, await answer.read())

    async def begin(self, model_id: str, spec: ModelSpec) -> None:
        """Create a model."""
        path = f"{routes.HEAD_MODELS}/{model_id}"
        await self.send(path, spec.model_dump_json().encode(), model_id, method="PUT")
        await self.result(f"{model_id}:0")

    async def sampler(self, session: str, owner: str = "me") -> None:
        """Register a sampling session of the base model."""
        spec = SamplerSpec(owner=owner).model_dump_json().encode()
        await self.send(f"{routes.HEAD_SAMPLERS}/{session}", spec, session, method="PUT")

    async def result(self, request_id: str, accept: str = future_responses.PROTOBUF) -> Answer:
        """Wait for the result of a request."""
        body, target = orjson.dumps({"request_id": request_id}), request_id.rpartition(":")[0]
        return await self.send(routes.RETRIEVE_FUTURE, body, target, accept=accept)

    async def failure(self, request_id: str) -> str:
        """Return why a request failed."""
        return str(orjson.loads((await self.result(request_id)).body)["error"])


@asynccontextmanager
async def a_served_head(
    folder: Path, limits: Limits | None = None, chat_template: str | None = None
) -> AsyncIterator[ServedHead]:
    """Serve a head of the tiny model, which has a chat template if one is given."""
    limits = limits or Limits()
    config = HeadConfig(
        head="h",
        generation="g1",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=(folder / "store").as_uri(),
        scratch_dir=str(folder / "scratch"),
        limits=limits,
    )
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    with an_engine(tiny_llama(), folder / "scratch") as engine:
        store = CheckpointStore(open_store(config.checkpoint_root))
        limits_of_model = engine.trainer.limits
        backend = Backend(
            config,
            engine.trainer,
            engine.sampler,
            engine.thread,
            store,
            frozenset(),
            text=ChatText(
                tokenizer, limits_of_model.max_context_length, limits_of_model.vocab_size
            ),
        )
        lifecycle = Lifecycle(config.timings, lambda: backend)
        app = HeadApp(lifecycle, limits, HeadToken(token_file), config.generation)
        async with served(app) as url, aiohttp.ClientSession() as client:
            head = ServedHead(lifecycle, backend, url, client)
            ready = await head.send(routes.HEAD_WAIT_READY, b"", "", method="GET")
            assert ready.status == 200
            yield head
