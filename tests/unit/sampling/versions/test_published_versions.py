"""The lifetime of published weights, and concurrency while they are written and read."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import (
    a_sampling_request,
    an_engine,
    held,
    publish_adapter,
)
from tinkercloud_worker.engine.sampling.sampler_interface import (
    SamplingRequest,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.torch_sampler import versions

PATIENCE_SECONDS = 60.0
"""Only a failing test waits as long."""


def a_request(seed: int = 1) -> SamplingRequest:
    """Return a request that draws a few tokens."""
    return a_sampling_request([1, 2, 3], max_tokens=8, seed=seed, stop=StopRules(frozenset(), ()))


def tokens_of(result: SamplingResult) -> list[int]:
    """Return the one sampled sequence."""
    return list(result.sequences[0].tokens)


@contextmanager
def stopped(monkeypatch: pytest.MonkeyPatch, function: str) -> Iterator[threading.Event]:
    """Keep `versions` blocked while writing or reading a file; the event is set once it is."""
    started, may_continue = threading.Event(), threading.Event()
    real: Callable[..., Any] = getattr(versions, function)

    def waiting(*args: Any) -> Any:
        started.set()
        assert may_continue.wait(PATIENCE_SECONDS)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(versions, function, waiting)
        try:
            yield started
        finally:
            may_continue.set()


async def test_requests_accepted_before_their_version_is_retired_use_it(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await publish_adapter(engine, "old", seed=1)
        expected = [tokens_of(await engine.sampler.sample("old", a_request(n))) for n in range(9)]

        async with held(engine):
            waiting = [
                asyncio.create_task(engine.sampler.sample("old", a_request(n))) for n in range(9)
            ]
            await asyncio.sleep(0)
            await publish_adapter(engine, "new", seed=2)
            await engine.sampler.retire("old")
            with pytest.raises(NotFound):
                await engine.sampler.sample("old", a_request())

        assert [tokens_of(result) for result in await asyncio.gather(*waiting)] == expected


async def test_a_retired_spilled_version_is_read_back_for_waiting_requests_and_then_removed(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        expected = tokens_of(await engine.sampler.sample("old", a_request()))
        await publish_adapter(engine, "new", seed=2)

        async with held(engine):
            waiting = asyncio.create_task(engine.sampler.sample("old", a_request()))
            await asyncio.sleep(0)
            await engine.sampler.retire("old")
            assert len(list(tmp_path.iterdir())) == 1
        drawn = tokens_of(await waiting)

        assert drawn == expected
        await engine.sampler.retire("new")
        assert not list(tmp_path.iterdir())


async def test_a_damaged_file_of_a_spilled_version_is_refused_and_not_sampled(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        await publish_adapter(engine, "new", seed=2)
        [file] = tmp_path.iterdir()
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        with pytest.raises(OSError, match="the weights of a sampler is damaged"):
            await engine.sampler.sample("old", a_request())
        assert tokens_of(await engine.sampler.sample("new", a_request()))


async def test_a_cancelled_request_does_not_keep_a_retired_version(tmp_path: Path) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        await publish_adapter(engine, "new", seed=2)
        assert len(list(tmp_path.iterdir())) == 1

        async with held(engine):
            waiting = asyncio.create_task(engine.sampler.sample("old", a_request()))
            await asyncio.sleep(0)
            await engine.sampler.retire("old")
            waiting.cancel()
        # Between two jobs the thread takes a turn at sampling.
        for _ in range(2):
            await engine.thread.run(lambda _: None)

        assert not list(tmp_path.iterdir())


async def test_a_name_that_is_published_again_has_other_weights_for_new_requests_only(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        for name, seed in {"one": 1, "two": 2}.items():
            await publish_adapter(engine, name, seed)
        expected = [
            tokens_of(await engine.sampler.sample(name, a_request())) for name in ("one", "two")
        ]

        await publish_adapter(engine, "again", seed=1)
        async with held(engine):
            before = asyncio.create_task(engine.sampler.sample("again", a_request()))
            await asyncio.sleep(0)
            await engine.sampler.retire("again")
            await publish_adapter(engine, "again", seed=2)
            after = asyncio.create_task(engine.sampler.sample("again", a_request()))

        assert [tokens_of(await before), tokens_of(await after)] == expected


async def test_other_versions_are_sampled_and_retired_while_weights_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await publish_adapter(engine, "old", seed=1)
        with stopped(monkeypatch, "ActiveWeights") as is_copying:
            publishing = asyncio.create_task(publish_adapter(engine, "new", seed=2))
            assert await asyncio.to_thread(is_copying.wait, PATIENCE_SECONDS)

            assert tokens_of(await engine.sampler.sample("old", a_request()))
            await engine.sampler.retire("old")
            assert not publishing.done()
        await publishing


async def test_other_versions_are_sampled_published_and_retired_while_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        with stopped(monkeypatch, "save_file") as is_writing:
            publishing = asyncio.create_task(publish_adapter(engine, "new", seed=2))
            assert await asyncio.to_thread(is_writing.wait, PATIENCE_SECONDS)

            await engine.sampler.publish("base", None)
            for name in ("base", "old", "new"):
                assert tokens_of(await engine.sampler.sample(name, a_request()))
                await engine.sampler.retire(name)
            assert not publishing.done()
        await publishing

        assert not list(tmp_path.iterdir())


async def test_other_versions_are_published_and_retired_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        await publish_adapter(engine, "new", seed=2)
        with stopped(monkeypatch, "load_file") as is_reading:
            drawing = asyncio.create_task(engine.sampler.sample("old", a_request()))
            assert await asyncio.to_thread(is_reading.wait, PATIENCE_SECONDS)

            await engine.sampler.publish("base", None)
            for name in ("base", "old", "new"):
                await engine.sampler.retire(name)
            assert not drawing.done()
        assert tokens_of(await drawing)

        assert not list(tmp_path.iterdir())


async def test_a_cancelled_publication_leaves_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        with stopped(monkeypatch, "save_file") as is_writing:
            publishing = asyncio.create_task(publish_adapter(engine, "new", seed=2))
            assert await asyncio.to_thread(is_writing.wait, PATIENCE_SECONDS)

            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing

        with pytest.raises(NotFound):
            await engine.sampler.sample("new", a_request())
        assert tokens_of(await engine.sampler.sample("old", a_request()))


async def test_weights_that_cannot_be_spilled_stay_in_memory(tmp_path: Path) -> None:
    scratch_dir = tmp_path / "scratch"
    scratch_dir.touch()
    with an_engine(tiny_llama(), scratch_dir, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        expected = tokens_of(await engine.sampler.sample("old", a_request()))

        with pytest.raises(FileExistsError):
            await publish_adapter(engine, "new", seed=2)

        assert tokens_of(await engine.sampler.sample("old", a_request())) == expected
        with pytest.raises(NotFound):
            await engine.sampler.sample("new", a_request())
