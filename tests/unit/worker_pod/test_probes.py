"""Probes of a head by the kubelet, which has no token and does not wait."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    Limits,
    Timings,
    TrainerConfig,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.served_heads import TOKEN, served
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground, YieldPoint
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.head_app import HeadApp
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.wire.head_token import HeadToken

HOUR = 3600.0


@dataclass(frozen=True)
class Head:
    url: str
    client: aiohttp.ClientSession

    async def get(self, path: str, token: str = "") -> tuple[int, str]:
        headers = {routes.HEAD_TOKEN_HEADER: token} if token else {}
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def suspend(self) -> None:
        headers = {routes.HEAD_TOKEN_HEADER: TOKEN}
        async with self.client.post(self.url + routes.HEAD_SUSPEND, headers=headers) as response:
            assert response.status == 200


@asynccontextmanager
async def a_head(build: Callable[[], Backend]) -> AsyncIterator[Head]:
    """Serve a head that loads with `build`; return once it has started loading."""
    with tempfile.NamedTemporaryFile("w+") as token_file:
        token_file.write(TOKEN)
        token_file.flush()
        token = HeadToken(Path(token_file.name))
    app = HeadApp(Lifecycle(Timings(), build), Limits(), token, "g1")
    async with served(app) as url, aiohttp.ClientSession() as client:
        yield Head(url, client)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    config = HeadConfig(
        head="h",
        generation="g1",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
    )
    store = CheckpointStore(open_store(config.checkpoint_root))
    with an_engine(tiny_llama(), tmp_path / "scratch") as engine:
        yield Backend(config, engine.trainer, engine.sampler, engine.thread, store, frozenset())


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_a_loading_head_is_alive_but_not_ready(
    backend: Backend,
) -> None:
    loaded = threading.Event()

    def load() -> Backend:
        loaded.wait()
        return backend

    async with a_head(load) as head:
        alive, ready = await head.get(routes.HEAD_HEALTH), await head.get(routes.HEAD_READY)
        loaded.set()

    assert alive[0] == 200
    assert ready[0] == 503
    assert "loading its model" in ready[1]


async def test_a_loaded_head_is_ready_without_a_token(backend: Backend) -> None:
    async with a_head(lambda: backend) as head:
        waited = await head.get(routes.HEAD_WAIT_READY, TOKEN)

        assert await head.get(routes.HEAD_READY) == waited == (200, '{"status": "ready"}')


@pytest.mark.parametrize("path", [routes.HEAD_WAIT_READY, routes.HEAD_STATUS, "/healthz/more"])
async def test_everything_except_the_probes_needs_the_token(backend: Backend, path: str) -> None:
    async with a_head(lambda: backend) as head:
        await head.get(routes.HEAD_WAIT_READY, TOKEN)

        assert (await head.get(path))[0] == 401
        assert (await head.get(path, "guessed"))[0] == 401


async def test_metrics_need_no_token(backend: Backend) -> None:
    metrics.ENGINE_LOSSES.labels("http://engine").inc(2)
    async with a_head(lambda: backend) as head:
        status, text = await head.get(routes.HEAD_METRICS)

    assert status == 200
    assert 'tinkercloud_engine_losses_total{engine="http://engine"} 2.0' in text


async def test_a_suspended_head_is_alive_but_not_ready(backend: Backend) -> None:
    async with a_head(lambda: backend) as head:
        await head.get(routes.HEAD_WAIT_READY, TOKEN)
        await head.suspend()
        alive, ready = await head.get(routes.HEAD_HEALTH), await head.get(routes.HEAD_READY)

    assert alive[0] == 200
    assert ready[0] == 503
    assert "suspended" in ready[1]


@pytest.mark.parametrize(("ranks", "more"), [(0, 0.0), (2, 2 * HOUR)])
async def test_long_steps_and_starting_ranks_do_not_count_as_hanging(
    backend: Backend, ranks: int, more: float
) -> None:
    trainer = TrainerConfig(ranks=ranks, start_timeout_seconds=2 * HOUR)
    backend = replace(backend, config=backend.config.model_copy(update={"trainer": trainer}))
    clock, reached, proceed = Clock(), threading.Event(), threading.Event()
    thread = EngineThread(lambda _: None, now=clock)
    thread.start(NoBackground())

    def two_hour_step(pause: YieldPoint) -> None:
        clock.seconds += HOUR
        pause()
        clock.seconds += HOUR + more
        reached.set()
        proceed.wait()

    async with a_head(lambda: replace(backend, thread=thread)) as head:
        await head.get(routes.HEAD_WAIT_READY, TOKEN)
        step = asyncio.create_task(thread.run(two_hour_step))
        await asyncio.to_thread(reached.wait)
        within, _ = await head.get(routes.HEAD_HEALTH)
        clock.seconds += HOUR
        beyond, reason = await head.get(routes.HEAD_HEALTH)
        proceed.set()
        await step

    assert within == 200
    assert beyond == 503
    assert "hangs" in reason


async def test_an_idle_engine_does_not_count_as_hanging(backend: Backend) -> None:
    clock = Clock()
    thread = EngineThread(lambda _: None, now=clock)
    thread.start(NoBackground())

    async with a_head(lambda: replace(backend, thread=thread)) as head:
        await head.get(routes.HEAD_WAIT_READY, TOKEN)
        await thread.run(lambda _: None)
        clock.seconds += 24 * HOUR
        await asyncio.to_thread(wait_until, lambda: thread.silent_seconds() == 0.0, "rest")

        assert (await head.get(routes.HEAD_HEALTH))[0] == 200


async def test_an_engine_whose_thread_has_ended_is_not_alive(backend: Backend) -> None:
    thread = EngineThread(lambda _: None)
    thread.start(NoBackground())

    async with a_head(lambda: replace(backend, thread=thread)) as head:
        await head.get(routes.HEAD_WAIT_READY, TOKEN)
        thread.stop()

        assert (await head.get(routes.HEAD_HEALTH))[0] == 503
