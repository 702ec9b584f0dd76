"""Metrics of engines."""

import asyncio
from pathlib import Path

import pytest

from tinkercloud_testing.sglang.engine import (
    FakeSglang,
)
from tinkercloud_testing.sglang.sampling import (
    WHOLE,
    a_sampler,
    a_whole_model,
    an_adapter,
    cleaned_up,
    counted,
)
from tinkercloud_testing.training.engines import Engine, a_sampling_request

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("_counters")
async def test_loads_failures_and_lost_adapters_of_an_engine_are_counted(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    fakes[0].refuses = frozenset({WHOLE})
    sampler = a_sampler(fakes[:1], tmp_path)
    await sampler.publish("sharp", a_whole_model(engine, 3.0))
    await sampler.publish("one", an_adapter(engine, 1))
    await sampler.publish("two", an_adapter(engine, 2))
    fakes[0].restart()
    await sampler.sample("one", a_sampling_request([1, 2]))
    await sampler.retire("two")
    await cleaned_up(sampler)

    adapters, models = ({"what": what, "way": "request"} for what in ("adapter", "model"))
    assert counted(fakes[0], "load_seconds_count", **adapters) == 3
    assert counted(fakes[0], "load_failures_total", **models) == 1
    assert counted(fakes[0], "load_seconds_count", **models | {"way": "file"}) == 2
    assert counted(fakes[0], "lost_adapters_total") == 1
    assert counted(fakes[0], "restarts_total") == 1
    assert counted(fakes[0], "unloads_total") == 1
    assert counted(fakes[0], "adapters") == 1
    await sampler.close()


@pytest.mark.usefixtures("_counters")
async def test_running_and_waiting_requests_are_counted_separately(
    fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await sampler.publish("base", None)
    async with sampler.training():
        task = asyncio.create_task(sampler.sample("base", a_sampling_request([1, 2])))
        await asyncio.sleep(0)
        while_training = [counted(fakes[0], "requests", state=s) for s in ("running", "waiting")]
    await task

    assert while_training == [0, 1]
    assert [counted(fakes[0], "requests", state=s) for s in ("running", "waiting")] == [0, 0]
    assert counted(fakes[0], "up") == 1
    await sampler.close()
