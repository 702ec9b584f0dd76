"""Engines that follow the load: which of them get requests, and how many the head needs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.engine_scaling_settings import EngineScaling
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.sglang.engine import FakeSglang, listening
from tinkercloud_testing.sglang.sampling import TENSORS, a_sampler, an_adapter, publish, servers_of
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.inference import engine_scaler, inference_server, routing
from tinkercloud_worker.inference.sampler import InferenceSampler

SCALING = EngineScaling(min_engines=1, target_samples=4, up_seconds=0.1, down_seconds=0.5)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe the load and the health of engines often."""
    monkeypatch.setattr(engine_scaler, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(inference_server, "_RECOVERY_SECONDS", 0.02)


@pytest.fixture
async def scaled(fakes: list[FakeSglang], tmp_path: Path) -> AsyncIterator[InferenceSampler]:
    """A sampler that starts with the first of two engines."""
    running = a_sampler(fakes, tmp_path, scaling=SCALING, adapters_seen=False)
    yield running
    await running.close()


async def needed(sampler: InferenceSampler, engines: int) -> int:
    assert sampler.scaler is not None
    return await sampler.scaler.needed(engines)


def is_preparing(sampler: InferenceSampler) -> bool:
    """Return whether an engine is being prepared for its first request."""
    return bool(sampler._pool._joining)


def sampling(sampler: InferenceSampler, version: str, number: int) -> list[asyncio.Task[object]]:
    """Send requests of two samples each, with prompts of different routing keys."""
    request = a_sampling_request([1, 2], num_samples=2)
    return [asyncio.create_task(sampler.sample(version, request)) for _ in range(number)]


async def test_another_engine_gets_the_adapters_before_its_first_request(
    engine: Engine, fakes: list[FakeSglang], scaled: InferenceSampler
) -> None:
    first, second = fakes
    for number in range(8):
        await publish(engine, scaled, f"run-{number}", an_adapter(engine, number))
    async with first.holding("/generate"):
        waiting = [task for n in range(8) for task in sampling(scaled, f"run-{n}", 1)]
        assert await needed(scaled, 1) == 2
        assert second.calls == []
        asking = asyncio.create_task(needed(scaled, 2))
        async with asyncio.timeout(30):
            await reached(lambda: len(second.adapters) == 8 and not is_preparing(scaled))
            later = [task for n in range(8) for task in sampling(scaled, f"run-{n}", 1)]
            await reached(lambda: any("lora_path" in body for body in second.called("/generate")))
    await asyncio.gather(*waiting, *later)
    asking.cancel()

    order = [path for path, body in second.calls if path == TENSORS or body.get("lora_path")]
    assert order[:8] == [TENSORS] * 8


async def test_requests_that_wait_for_a_lost_engine_go_to_one_that_joins(
    engine: Engine, fakes: list[FakeSglang], model_folder: Path, tmp_path: Path
) -> None:
    lost = FakeSglang(engine, model_folder)
    async with listening(lost):
        sampler = a_sampler([lost, fakes[0]], tmp_path, scaling=SCALING, adapters_seen=False)
        await publish(engine, sampler, "one", an_adapter(engine, 1))
    waiting = sampling(sampler, "one", 3)
    await reached(lambda: not servers_of(sampler)[lost.url].is_up)
    assert await needed(sampler, 1) == 2

    asking = asyncio.create_task(needed(sampler, 2))
    async with asyncio.timeout(30):
        await asyncio.gather(*waiting)

    assert len(fakes[0].called("/generate")) >= len(waiting)
    asking.cancel()
    await sampler.close()


def preferring(fake: FakeSglang, fakes: list[FakeSglang]) -> str:
    """Return a version whose requests go to an engine while it is not busy."""
    urls = {each.url: 0 for each in fakes}
    names = (f"run-{number}" for number in range(1000))
    return next(name for name in names if routing.order(name, urls)[0] == fake.url)


async def test_an_engine_is_released_after_its_last_request_and_may_start_again(
    engine: Engine, fakes: list[FakeSglang], scaled: InferenceSampler
) -> None:
    first, second = fakes
    here, there = preferring(first, fakes), preferring(second, fakes)
    for seed, name in enumerate((here, there)):
        await publish(engine, scaled, name, an_adapter(engine, seed))
    async with asyncio.timeout(60):
        async with AsyncExitStack() as held:
            await held.enter_async_context(first.holding("/generate"))
            busy = sampling(scaled, here, 4)
            joining = asyncio.create_task(needed(scaled, 2))
            await reached(lambda: len(second.adapters) == 2 and not is_preparing(scaled))
            async with second.holding("/generate") as is_called:
                [last] = sampling(scaled, there, 1)
                await is_called.wait()
                leaving = asyncio.create_task(needed(scaled, 2))
                await joining
                await held.aclose()
                await asyncio.gather(*busy)
                await asyncio.sleep(2 * SCALING.down_seconds)
                before = len(second.called("/generate"))
                await asyncio.gather(*sampling(scaled, there, 1))
                assert not leaving.done()
                assert len(second.called("/generate")) == before
            await last
        assert await leaving == 1
        assert second.adapters == {}

        second.restart()
        async with first.holding("/generate"):
            busy = sampling(scaled, here, 4)
            assert await needed(scaled, 1) == 2
            asking = asyncio.create_task(needed(scaled, 2))
            await reached(lambda: len(second.adapters) == 2)
        await asyncio.gather(*busy)
        assert await asking == 1
