"""Engines that hang with requests, and engines that are only slow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from tinkercloud_testing.sglang.engine import FakeSglang
from tinkercloud_testing.sglang.sampling import (
    NEVER,
    PROMPTS,
    a_sampler,
    an_adapter,
    assert_same,
    counted,
    publish,
    servers_of,
)
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.inference import inference_server, server_pool
from tinkercloud_worker.inference.client import ServerUnreachable
from tinkercloud_worker.inference.routing import order
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import sglang_dialect
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect

pytestmark = pytest.mark.slow

T = TypeVar("T")
REQUEST = a_sampling_request(PROMPTS[0], stop=NEVER)


@pytest.fixture(autouse=True)
def _attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check engines with requests continuously, and mark them lost after one failure."""
    monkeypatch.setattr(inference_server, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(inference_server, "_HUNG_SECONDS", 0.0)
    monkeypatch.setattr(inference_server, "_UNWELL_SECONDS", 0.0)
    monkeypatch.setattr(inference_server, "_RECOVERY_SECONDS", 0.01)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_dialect, "_CALL_SECONDS", 1.0)


@asynccontextmanager
async def hanging(fake: FakeSglang) -> AsyncIterator[asyncio.Event]:
    """Make an engine hang and fail health checks; yield an event of the first request."""
    async with fake.holding("/generate") as was_asked, fake.holding("/model_info"):
        yield was_asked


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what happens at an engine
            await asyncio.sleep(0.001)


async def soon(task: asyncio.Task[T]) -> T:
    """Return the result of a task, with a timeout in case its request hangs."""
    return await asyncio.wait_for(task, 60)


def drawn(fake: FakeSglang) -> int:
    """Return the number of requests to an engine, without verifications."""
    return len([body for body in fake.called("/generate") if "lora_path" in body])


@pytest.fixture
async def warm(engine: Engine, fakes: list[FakeSglang], tmp_path: Path) -> InferenceSampler:
    """A sampler that has sampled with the adapter `one` at both of its engines."""
    sampler = a_sampler(fakes, tmp_path)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    await asyncio.gather(*[sampler.sample("one", REQUEST) for _ in range(24)])
    return sampler


def in_order(fakes: list[FakeSglang]) -> list[FakeSglang]:
    """Return the engines in the order of the session's preference."""
    ranked = order("one", {fake.url: 0 for fake in fakes})
    return sorted(fakes, key=lambda fake: ranked.index(fake.url))


@pytest.mark.usefixtures("_counters", "_impatient")
async def test_requests_of_a_hung_engine_go_to_another(
    engine: Engine, fakes: list[FakeSglang], warm: InferenceSampler
) -> None:
    hung, other = in_order(fakes)
    before = drawn(other)
    async with hanging(hung) as was_asked:
        asked = asyncio.create_task(warm.sample("one", REQUEST))
        await was_asked.wait()

        assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))

        assert drawn(other) == before + 1
        assert counted(hung, "up") == 0
    assert counted(hung, "losses_total") == 1
    await warm.close()


@pytest.mark.usefixtures("_counters")
async def test_a_slow_engine_is_health_checked_and_keeps_its_requests(
    engine: Engine,
    fakes: list[FakeSglang],
    warm: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, _ = in_order(fakes)
    before, answers = drawn(slow), 0
    check = SglangDialect.check_health

    async def counting(dialect: SglangDialect) -> None:
        nonlocal answers
        await check(dialect)
        answers += 1

    monkeypatch.setattr(SglangDialect, "check_health", counting)
    async with slow.holding("/generate") as was_asked:
        asked = asyncio.create_task(warm.sample("one", REQUEST))
        await was_asked.wait()
        await until(lambda: answers >= 5)
        assert not asked.done()

    assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))
    assert drawn(slow) == before + 1
    assert counted(slow, "losses_total") == 0
    assert [each._watching for each in servers_of(warm).values()] == [None, None]
    await warm.close()


@pytest.mark.usefixtures("_counters", "_impatient")
async def test_a_trainer_gets_the_gpus_after_a_request_at_a_hung_engine(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    fake = fakes[0]
    sampler = a_sampler([fake], tmp_path, colocated=True)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    async with hanging(fake) as was_asked:
        asked = asyncio.create_task(sampler.sample("one", REQUEST))
        await was_asked.wait()
        training = sampler.training()
        entering = asyncio.create_task(training.__aenter__())
        await until(lambda: counted(fake, "requests", state="running") == 0)
        assert not entering.done()

    await soon(entering)
    assert fake.released
    await training.__aexit__(None, None, None)
    assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))
    await sampler.close()


@pytest.mark.usefixtures("_impatient")
async def test_requests_move_when_another_request_finds_their_engine_lost(
    engine: Engine,
    fakes: list[FakeSglang],
    warm: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference_server, "_SILENT_SECONDS", 600.0)
    gone, other = in_order(fakes)
    before = drawn(other)
    async with hanging(gone) as was_asked:
        asked = asyncio.create_task(warm.sample("one", REQUEST))
        await was_asked.wait()
        servers_of(warm)[gone.url].begin_recovery(ServerUnreachable("a connection was refused"))

        assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))

    assert drawn(other) == before + 1
    await warm.close()


@pytest.mark.parametrize("unwell", [0, 3], ids=["well", "not well for a while"])
async def test_a_broken_connection_does_not_affect_other_requests_of_a_healthy_engine(
    engine: Engine,
    fakes: list[FakeSglang],
    warm: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
    unwell: int,
) -> None:
    monkeypatch.setattr(inference_server, "_UNWELL_SECONDS", 600.0)
    looks, check = 0, SglangDialect.check_health

    async def busy(dialect: SglangDialect) -> None:
        nonlocal looks
        looks += 1
        if looks <= unwell:
            raise ServerUnreachable("it loads weights")
        await check(dialect)

    fake, other = in_order(fakes)
    before = [drawn(fake), drawn(other)]
    async with fake.holding("/generate") as was_asked:
        asked = asyncio.create_task(warm.sample("one", REQUEST))
        await was_asked.wait()
        monkeypatch.setattr(SglangDialect, "check_health", busy)
        servers_of(warm)[fake.url].begin_recovery(ServerUnreachable("a connection was closed"))
        await servers_of(warm)[fake.url].recovered()
        assert not asked.done()

    assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))
    assert [drawn(fake), drawn(other)] == [before[0] + 1, before[1]]
    await warm.close()


async def test_an_engine_that_hangs_during_verification_is_detected(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = a_sampler(fakes, tmp_path)
    monkeypatch.setattr(sglang_dialect, "_CALL_SECONDS", 1.0)
    hung, other = in_order(fakes)
    async with AsyncExitStack() as stack:
        was_asked = await stack.enter_async_context(hung.holding("/generate"))
        asked = asyncio.create_task(publish(engine, sampler, "one", an_adapter(engine, 1)))
        await was_asked.wait()
        await stack.enter_async_context(hung.holding("/model_info"))

        await soon(asked)
        assert_same(
            await sampler.sample("one", REQUEST), await engine.sampler.sample("one", REQUEST)
        )

    assert drawn(other) == 1
    await sampler.close()


async def test_time_at_a_lost_engine_does_not_count_as_waiting(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(server_pool, "time", SimpleNamespace(monotonic=lambda: now))
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    [client] = servers_of(sampler).values()
    async with fakes[0].holding("/generate") as was_asked:
        asked = asyncio.create_task(sampler.sample("one", REQUEST))
        await was_asked.wait()
        now += 1000.0
        client.begin_recovery(ServerUnreachable("a connection was closed"))
        client.dialect.client.abort_calls("the engine is lost")
        await client.recovered()
        assert not asked.done()

    assert_same(await soon(asked), await engine.sampler.sample("one", REQUEST))
    await sampler.close()
