"""Full models in memory shared with engines, opened by SGLang's own reader."""

import asyncio
import base64
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.engines import Engine
from tinkercloud_testing.sglang import FakeSglang
from tinkercloud_testing.sglang_sampling import (
    FOLDER,
    WHOLE,
    a_sampler,
    a_whole_model,
    an_adapter,
    assert_sampled,
    children_running,
    counted,
    in_two_dtypes,
    publish,
)
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import weights as sglang_weights

pytestmark = pytest.mark.slow

PARTS = "tinkercloud_worker.inference.sglang.shared_memory_sender"


@pytest.fixture
async def sampler(fakes: list[FakeSglang], tmp_path: Path) -> AsyncIterator[InferenceSampler]:
    running = a_sampler(fakes[:1], tmp_path, shared_memory="cpu", recovery_seconds=300.0)
    yield running
    await running.close()
    assert children_running(PARTS) == []


async def assert_nothing_is_left(fake: FakeSglang) -> None:
    """Wait until all files with handles at the engine are removed."""
    handles = [base64.b64decode(body["serialized_named_tensors"][0]) for body in fake.called(WHOLE)]
    names = [name for handle in handles for name in re.findall(rb"/torch_\w+", handle)]
    files = [Path("/dev/shm" + name.decode()) for name in names]  # noqa: S108 - torch's own place
    assert files
    async with asyncio.timeout(20):
        while any(file.exists() for file in files):  # noqa: ASYNC110 - another process's work
            await asyncio.sleep(0.1)


def sizes_of_requests(fake: FakeSglang) -> list[int]:
    """Return the bytes of tensors or handles for the first rank in each request."""
    return [len(body["serialized_named_tensors"][0]) for body in fake.called(WHOLE)]


@pytest.mark.usefixtures("_counters")
async def test_full_models_of_several_dtypes_are_transferred_in_parts(
    engine: Engine,
    fakes: list[FakeSglang],
    sampler: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes[0].tp_size = 2
    sharp, flat = in_two_dtypes(a_whole_model(engine, 3.0)), a_whole_model(engine, 0.3)
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", sharp.size_bytes // 4)
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "sharp", sharp)
    await publish(engine, sampler, "flat", flat)
    await publish(engine, sampler, "adapted", an_adapter(engine, 1))

    for version in ("sharp", "base", "adapted", "flat"):
        await assert_sampled(engine, sampler, version)

    sizes = sizes_of_requests(fakes[0])
    assert len(sizes) >= 4 * 4
    assert max(sizes) < 10_000 < sharp.size_bytes // 8
    assert {Path(body["model_path"]) for body in fakes[0].called(FOLDER)} == {fakes[0].model_path}
    assert counted(fakes[0], "load_seconds_count", what="model", way="shared_memory") == 4
    assert children_running(PARTS) == []
    await assert_nothing_is_left(fakes[0])


async def test_an_engine_that_can_not_open_handles_gets_the_values(
    engine: Engine, fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    """An engine in another container crashes on the handles."""
    fakes[0].sees_our_memory = False

    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    await assert_sampled(engine, sampler, "sharp")
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))
    await assert_sampled(engine, sampler, "flat")

    are_handles = [size < 10_000 for size in sizes_of_requests(fakes[0])]
    assert (are_handles.count(True), are_handles.count(False)) == (2, 2)
    assert not fakes[0].is_updating


async def test_an_engine_that_rejects_handles_gets_files_from_then_on(
    engine: Engine, fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    fakes[0].refuses = frozenset({WHOLE})
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    asked = len(fakes[0].called(WHOLE))
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))

    await assert_sampled(engine, sampler, "sharp")

    assert len(fakes[0].called(WHOLE)) == asked == 2
    assert not fakes[0].is_updating


async def test_a_killed_sender_falls_back_to_the_next_method(
    engine: Engine,
    fakes: list[FakeSglang],
    sampler: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", 1 << 16)
    fake, load = fakes[0], fakes[0].update_weights_from_tensor

    async def load_from_the_dead(asked: Any) -> dict[str, Any]:
        answer = await load(asked)
        for process in children_running(PARTS):
            os.kill(process, signal.SIGKILL)
        return answer

    monkeypatch.setattr(fake, "update_weights_from_tensor", load_from_the_dead)

    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))

    await assert_sampled(engine, sampler, "sharp")
    assert max(sizes_of_requests(fake)) > 1 << 16
    assert children_running(PARTS) == []
    await assert_nothing_is_left(fake)
