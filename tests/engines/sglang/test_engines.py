"""Which engine gets a request, and what happens when an engine ends or restarts."""

import asyncio
from pathlib import Path

import pytest

from tinkercloud_testing.sglang.engine import (
    FakeSglang,
    listening,
)
from tinkercloud_testing.sglang.sampling import (
    NEVER,
    PROMPTS,
    TENSORS,
    a_sampler,
    a_whole_model,
    an_adapter,
    assert_same,
    cleaned_up,
    counted,
    publish,
    servers_of,
)
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.engine.turns.engine_thread import NoBackground
from tinkercloud_worker.inference.client import ServerUnreachable
from tinkercloud_worker.inference.colocation import ColocatedThread
from tinkercloud_worker.inference.routing import order
from tinkercloud_worker.inference.sampler import InferenceSampler

pytestmark = pytest.mark.slow


async def test_a_session_stays_on_one_engine_and_sessions_are_spread(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    # The preferred engine of a session depends on the ports, which differ between runs.
    urls = {fake.url: 0 for fake in fakes}
    sessions = sorted((f"s:sample:{n}" for n in range(64)), key=lambda name: order(name, urls))
    for number, session in enumerate([*sessions[:4], *sessions[-4:]]):
        await sampler.publish(session, an_adapter(engine, number))
        for prompt in PROMPTS:
            await sampler.sample(session, a_sampling_request(prompt))

    asked = [
        {body.get("lora_path") for body in fake.called("/generate")} - {None} for fake in fakes
    ]
    assert list(map(len, asked)) == [4, 4]
    assert [set(fake.adapters) for fake in fakes] == asked


async def test_excess_load_of_one_engine_goes_to_the_other(
    sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("base", None)

    requests = [a_sampling_request([1, number], max_tokens=30) for number in range(64)]
    await asyncio.gather(*[sampler.sample("base", request) for request in requests])

    assert all(len(fake.called("/generate")) > 16 for fake in fakes)


async def test_requests_wait_for_a_restarting_engine_and_reload_its_adapters(
    engine: Engine, model_folder: Path, tmp_path: Path
) -> None:
    fake = FakeSglang(engine, model_folder)
    await engine.sampler.publish("base", None)
    async with listening(fake):
        port = int(fake.url.rpartition(":")[2])
        sampler = a_sampler([fake], tmp_path)
        await publish(engine, sampler, "one", an_adapter(engine, 1))
    fake.restart()
    request = a_sampling_request([1, 2], stop=NEVER)
    waiting = asyncio.create_task(sampler.sample("one", request))
    await asyncio.wait({waiting}, timeout=0.2)

    async with listening(fake, port):
        assert_same(await waiting, await engine.sampler.sample("one", request))
        await sampler.close()

    assert len(fake.called(TENSORS)) == 2
    # An engine is verified by sampling and scoring without an adapter, after each start.
    assert len([body for body in fake.called("/generate") if "lora_path" not in body]) == 4


@pytest.mark.usefixtures("_counters")
async def test_requests_go_to_the_remaining_engine(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    gone = FakeSglang(engine, fakes[0].model_path)
    async with listening(gone):
        pass
    sampler = a_sampler([gone, fakes[0]], tmp_path)

    for number in range(6):
        await sampler.publish(f"s:sample:{number}", an_adapter(engine, number))
        await sampler.sample(f"s:sample:{number}", a_sampling_request([1, 2]))

    assert len(fakes[0].called(TENSORS)) == 6
    assert [counted(each, "up") for each in (gone, fakes[0])] == [0, 1]
    assert [counted(each, "losses_total") for each in (gone, fakes[0])] == [1, 0]
    await sampler.close()


async def test_a_request_fails_if_no_engine_recovers(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    gone = FakeSglang(engine, fakes[0].model_path)
    async with listening(gone):
        pass
    sampler = a_sampler([gone], tmp_path, recovery_seconds=0.2)
    await sampler.publish("base", None)

    with pytest.raises(ServerUnreachable, match="no inference server responds") as raised:
        await sampler.sample("base", a_sampling_request([1]))

    assert raised.value.category == "server"
    await sampler.close()


async def test_an_unreachable_engine_is_not_mistaken_for_a_restarted_one(
    engine: Engine, model_folder: Path, tmp_path: Path
) -> None:
    fake = FakeSglang(engine, model_folder)
    await engine.sampler.publish("base", None)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    async with listening(fake):
        port = int(fake.url.rpartition(":")[2])
        sampler = a_sampler([fake], tmp_path, colocated=True)
        await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
        await sampler.publish("base", None)
        await sampler.sample("sharp", request)
        async with sampler.training():
            assert fake.released
    waiting = asyncio.create_task(sampler.sample("base", request))
    await asyncio.wait({waiting}, timeout=0.2)

    async with listening(fake, port):
        assert_same(await waiting, await engine.sampler.sample("base", request))
        await sampler.close()


@pytest.mark.parametrize("trains_first", [True, False])
async def test_a_head_resumes_engines_whose_memory_the_previous_head_had(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, trains_first: bool
) -> None:
    first = a_sampler(fakes[:1], tmp_path / "first", colocated=True)
    await first.publish("base", None)
    await first.sample("base", a_sampling_request([1]))
    held = first.training()
    await held.__aenter__()
    second = a_sampler(fakes[:1], tmp_path / "second", colocated=True, generation="g2")
    await second.publish("base", None)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    if trains_first:
        async with second.training():
            assert fakes[0].released
    theirs = await second.sample("base", request)

    assert_same(theirs, await engine.sampler.sample("base", request))
    # A head that was killed may have marked an engine, and no more.
    times = 2 if trains_first else 1
    assert len(fakes[0].called("/release_memory_occupation")) == times
    assert len(fakes[0].called("/resume_memory_occupation")) == times
    await asyncio.gather(first.close(), second.close())


async def test_an_engine_that_restarts_between_steps_releases_its_memory_again(
    fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes, tmp_path, colocated=True)
    async with sampler.training():
        assert all(fake.released for fake in fakes)
    fakes[1].restart()

    async with sampler.training():
        assert all(fake.released for fake in fakes)

    assert [len(fake.called("/release_memory_occupation")) for fake in fakes] == [1, 2]
    await sampler.close()


async def test_a_trainer_waits_for_a_lost_engine_and_fails_after_a_timeout(
    engine: Engine, fakes: list[FakeSglang], model_folder: Path, tmp_path: Path
) -> None:
    away = FakeSglang(engine, model_folder)
    async with listening(away):
        port = int(away.url.rpartition(":")[2])
    sampler = a_sampler([fakes[0], away], tmp_path, colocated=True)
    entering = asyncio.create_task(sampler.training().__aenter__())
    await asyncio.wait({entering}, timeout=1.5)
    assert not entering.done()
    assert counted(away, "up") == 0

    async with listening(away, port):
        await entering
        assert away.released

    impatient = a_sampler([away], tmp_path / "other", colocated=True, recovery_seconds=0.1)
    with pytest.raises(ServerUnreachable, match="which shares GPUs with the trainer"):
        await impatient.training().__aenter__()
    await asyncio.gather(sampler.close(), impatient.close())


async def test_a_restarted_engine_is_not_asked_to_resume_its_memory(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2])
    async with sampler.training():
        fakes[0].restart()

    theirs = await sampler.sample("one", request)

    assert_same(theirs, await engine.sampler.sample("one", request))
    assert fakes[0].called("/resume_memory_occupation") == []
    await sampler.close()


async def test_an_engine_lost_while_releasing_its_memory_recovers(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    await sampler.publish("base", None)
    [client] = servers_of(sampler).values()
    async with sampler.training():
        client.begin_recovery(ServerUnreachable("a connection was closed"))

    theirs = await sampler.sample("base", a_sampling_request([1]))

    assert_same(theirs, await engine.sampler.sample("base", a_sampling_request([1])))
    await sampler.close()


async def test_a_head_killed_before_its_engine_released_memory_does_not_affect_the_next(
    fakes: list[FakeSglang], tmp_path: Path
) -> None:
    await fakes[0].mark("first/base+released")
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)

    async with sampler.training():
        assert fakes[0].released

    await sampler.close()


async def test_colocated_engines_release_their_memory_while_the_trainer_computes(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes, tmp_path, colocated=True)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2], max_tokens=30)
    thread = ColocatedThread(sampler.training, release=lambda: None, on_crash=lambda _: None)
    thread.start(NoBackground())

    async def train() -> list[set[str]]:
        return await thread.run(lambda _: [set(fake.released) for fake in fakes])

    before = [asyncio.create_task(sampler.sample("one", request)) for _ in range(3)]
    passes = [asyncio.create_task(train()) for _ in range(2)]
    after = [asyncio.create_task(sampler.sample("one", request)) for _ in range(3)]
    released, results = await asyncio.gather(*passes), await asyncio.gather(*before, *after)

    everything = {"kv_cache", "weights", "cuda_graph"}
    assert released == [[everything, everything]] * 2
    assert [len(fake.called("/release_memory_occupation")) for fake in fakes] == [1, 1]
    for result in results:
        assert_same(result, await engine.sampler.sample("one", request))
    await train()
    await sampler.retire("one")
    await cleaned_up(sampler)
    assert [fake.adapters for fake in fakes] == [{}, {}]
    thread.stop()
    await sampler.close()
