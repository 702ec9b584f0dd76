"""Full models over a process group whose other ranks run SGLang's own functions."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.sglang.engine import FakeSglang
from tinkercloud_testing.sglang.sampling import (
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
from tinkercloud_testing.training.engines import Engine
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import delivery, process_group
from tinkercloud_worker.inference.sglang import weights as sglang_weights

pytestmark = pytest.mark.slow

JOIN, SEND, LEAVE = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
RANK = "tinkercloud_worker.inference.sglang.process_group_rank"


@pytest.fixture
async def sampler(fakes: list[FakeSglang], tmp_path: Path) -> AsyncIterator[InferenceSampler]:
    running = a_sampler(fakes[:1], tmp_path, process_group="gloo", recovery_seconds=300.0)
    yield running
    await running.close()
    assert ranks_of_heads() == []


def ranks_of_heads() -> list[int]:
    """Return the child processes that are rank 0 of a group."""
    return children_running(RANK)


@pytest.mark.usefixtures("_counters")
async def test_full_models_of_several_dtypes_are_sent_over_one_group_in_parts(
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

    assert fakes[0].called(WHOLE) == []
    assert len(fakes[0].called(JOIN)) == 1
    assert len(fakes[0].called(SEND)) >= 4 * 4
    assert any("bfloat16" in body["dtypes"] for body in fakes[0].called(SEND))
    assert {Path(body["model_path"]) for body in fakes[0].called(FOLDER)} == {fakes[0].model_path}
    assert counted(fakes[0], "load_seconds_count", what="model", way="group") == 4
    await sampler.close()
    assert len(fakes[0].called(LEAVE)) == 2


@pytest.mark.parametrize(
    "state",
    [{"lacks": frozenset({LEAVE})}, {"refuses": frozenset({JOIN})}, {"refuses": frozenset({SEND})}],
)
async def test_an_engine_that_rejects_the_group_gets_requests_from_then_on(
    engine: Engine, fakes: list[FakeSglang], sampler: InferenceSampler, state: dict[str, object]
) -> None:
    vars(fakes[0]).update(state)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    asked = len(fakes[0].calls)
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))

    await assert_sampled(engine, sampler, "sharp")

    assert len(fakes[0].called(WHOLE)) == 3
    assert not {path for path, _ in fakes[0].calls[asked:]} & {JOIN, SEND, LEAVE}
    assert not fakes[0].is_updating
    assert ranks_of_heads() == []


async def test_after_a_restart_of_either_side_a_new_group_is_formed(
    engine: Engine, fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    fakes[0].lacks = frozenset({LEAVE})
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    fakes[0].lacks = frozenset()

    for _ in range(2):
        fakes[0].restart()
        await assert_sampled(engine, sampler, "sharp")
    assert len(fakes[0].called(JOIN)) == 2

    [ours] = ranks_of_heads()
    os.kill(ours, signal.SIGKILL)
    with suppress(ChildProcessError):
        await asyncio.to_thread(os.waitid, os.P_PID, ours, os.WEXITED | os.WNOWAIT)
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))
    await assert_sampled(engine, sampler, "flat")
    assert len(fakes[0].called(JOIN)) == 3
    assert len(fakes[0].called(WHOLE)) == 1


async def test_an_engine_that_dies_twice_during_a_transfer_gets_requests(
    engine: Engine, fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    fakes[0].ends_over = frozenset({SEND})

    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))

    await assert_sampled(engine, sampler, "sharp")
    assert len(fakes[0].called(JOIN)) == len(fakes[0].called(SEND)) == 2
    assert len(fakes[0].called(WHOLE)) == 1
    assert ranks_of_heads() == []


@pytest.mark.usefixtures("_counters")
async def test_a_hung_engine_is_lost_until_it_restarts(
    engine: Engine,
    fakes: list[FakeSglang],
    sampler: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own lock blocks all calls about weights."""
    monkeypatch.setattr(delivery, "_MAX_LOSSES", 1)
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))
    monkeypatch.setattr(process_group, "_STEP_SECONDS", 2.0)
    monkeypatch.setattr(process_group, "_RELEASE_SECONDS", 1.0)
    assert fakes[0].ranks is not None
    fakes[0].ranks.stop()

    async with asyncio.timeout(30):
        publishing = asyncio.create_task(
            publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
        )
        await asyncio.to_thread(
            wait_until, lambda: counted(fakes[0], "losses_total") == 1, "the engine is lost"
        )
        assert ranks_of_heads() == []
        fakes[0].ranks.kill()
        await publishing

    await assert_sampled(engine, sampler, "sharp")
    assert len(fakes[0].called(WHOLE)) == 1
    assert ranks_of_heads() == []


async def test_a_killed_sending_rank_does_not_block_the_engine(
    engine: Engine,
    fakes: list[FakeSglang],
    sampler: InferenceSampler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connections of a dead process are closed."""
    fake, answered = fakes[0], []
    receive = fake.update_weights_from_distributed

    async def receive_from_the_dead(asked: Any) -> dict[str, Any]:
        for process in ranks_of_heads():
            os.kill(process, signal.SIGKILL)
        async with asyncio.timeout(20):
            answered.append(await receive(asked))
        return answered[-1]

    monkeypatch.setattr(fake, "update_weights_from_distributed", receive_from_the_dead)

    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))

    await assert_sampled(engine, sampler, "sharp")
    assert [answer["success"] for answer in answered] == [False]
    assert len(fake.called(WHOLE)) == 1


def test_a_waiting_rank_ends_with_its_head() -> None:
    options = "--backend gloo --address 127.0.0.1 --world-size 2 --group-name a --seconds 60"
    with subprocess.Popen(
        [sys.executable, "-m", RANK, *options.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert orjson.loads(rank.stdout.readline())["port"] > 0

        rank.stdin.close()

        assert rank.wait(30) == 0
