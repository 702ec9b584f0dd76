"""Aborted requests that still run for a step or two when an engine gets a command."""

from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.sglang.engine import FakeSglang
from tinkercloud_testing.sglang.sampling import (
    FOLDER,
    NEVER,
    PROMPTS,
    WHOLE,
    a_sampler,
    a_whole_model,
    assert_sampled,
    publish,
)
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import weights as sglang_weights

pytestmark = pytest.mark.slow

RELEASE = "/release_memory_occupation"
FOREVER = 1 << 30


async def a_sampler_of_base_and_sharp(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> InferenceSampler:
    """Return a sampler of one engine with the base and a full model."""
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    return sampler


@pytest.mark.parametrize("state", [{}, {"refuses": frozenset({WHOLE})}], ids=["sent", "read"])
async def test_weights_are_replaced_once_aborted_requests_have_ended(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state: dict[str, Any]
) -> None:
    vars(fakes[0]).update(state)
    sampler = await a_sampler_of_base_and_sharp(engine, fakes, tmp_path)

    for version in ("base", "sharp", "base", "sharp"):
        fakes[0].unended = 2

        await assert_sampled(engine, sampler, version)

    # No transfer method was disabled because of it.
    sent, read = len(fakes[0].called(WHOLE)), len(fakes[0].called(FOLDER))
    assert (sent, read) == ((1, 5) if state else (3, 2))
    await sampler.close()


@pytest.mark.parametrize("state", [{}, {"refuses": frozenset({WHOLE})}], ids=["base", "whole"])
async def test_weights_are_loaded_again_if_a_request_ran_meanwhile(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state: dict[str, Any]
) -> None:
    vars(fakes[0]).update(state)
    sampler = await a_sampler_of_base_and_sharp(engine, fakes, tmp_path)
    read = "sharp" if state else "base"
    await assert_sampled(engine, sampler, "base" if state else "sharp")
    before = len(fakes[0].called(FOLDER))

    fakes[0].runs_over = frozenset({FOLDER})
    await assert_sampled(engine, sampler, read)

    assert len(fakes[0].called(FOLDER)) == before + 2
    await sampler.close()


@pytest.mark.parametrize("trains", [True, False])
async def test_the_weights_of_an_engine_are_unknown_after_a_failed_update(
    engine: Engine,
    fakes: list[FakeSglang],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trains: bool,
) -> None:
    monkeypatch.setattr(sglang_weights, "_DRAIN_SECONDS", 0.05)
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    await assert_sampled(engine, sampler, "sharp")
    fakes[0].runs_over = frozenset({FOLDER})
    fakes[0].steps_over = FOREVER
    with pytest.raises(ServerError, match="Timed out waiting for idle state"):
        await sampler.sample("base", a_sampling_request(PROMPTS[0], stop=NEVER))
    fakes[0].unended = 0
    if trains:
        async with sampler.training():
            assert fakes[0].released

    for version in ("sharp", "base"):
        await assert_sampled(engine, sampler, version)

    await sampler.close()


async def test_memory_is_released_once_aborted_requests_have_ended(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await publish(engine, sampler, "base", None)
    fakes[0].unended = 2

    async with sampler.training():
        assert fakes[0].released

    # It has not crashed because of it, and was called again.
    assert len(fakes[0].called(RELEASE)) == 1
    await sampler.close()


async def test_an_engine_that_can_not_be_drained_keeps_its_memory_and_generates_again(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "_DRAIN_SECONDS", 0.05)
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await publish(engine, sampler, "base", None)
    fakes[0].unended = FOREVER

    with pytest.raises(ServerError, match="Timed out waiting for idle state"):
        await sampler.training().__aenter__()

    await assert_sampled(engine, sampler, "base")
    assert fakes[0].called(RELEASE) == []
    await sampler.close()
