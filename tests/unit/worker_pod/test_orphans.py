"""A head whose API server is gone stops itself after a grace period."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, Timings
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.lifecycle import Lifecycle

GRACE_SECONDS = 0.01
TIMINGS = Timings(orphan_grace_seconds=GRACE_SECONDS, drain_seconds=1, suspend_seconds=1)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
    )
    store = CheckpointStore(open_store(config.checkpoint_root))
    with an_engine(tiny_llama(), tmp_path / "scratch") as engine:
        yield Backend(config, engine.trainer, engine.sampler, engine.thread, store, frozenset())


@pytest.fixture
async def stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    return stopped


async def test_a_head_that_loads_longer_than_its_grace_period_is_not_stopped(
    backend: Backend, stop_signal: asyncio.Event
) -> None:
    may_load = threading.Event()

    def build() -> Backend:
        may_load.wait()
        return backend

    lifecycle = Lifecycle(TIMINGS, build)
    lifecycle.start()
    await asyncio.sleep(20 * GRACE_SECONDS)
    was_stopped = stop_signal.is_set()
    may_load.set()
    await lifecycle.wait_until_ready()

    assert not was_stopped
    await stop_signal.wait()
    await lifecycle.stop()


async def test_a_head_runs_as_long_as_its_lease_is_held(
    backend: Backend, stop_signal: asyncio.Event
) -> None:
    lifecycle = Lifecycle(TIMINGS, lambda: backend)
    lifecycle.start()

    with lifecycle.held_lease():
        await lifecycle.wait_until_ready()
        await asyncio.sleep(20 * GRACE_SECONDS)
        was_stopped = stop_signal.is_set()

    assert not was_stopped
    await stop_signal.wait()
    await lifecycle.stop()
