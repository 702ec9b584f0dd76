"""Adapters: sent in requests or read from files, loaded once, and reloaded when lost."""

import asyncio
import base64
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, Limits
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_testing.sglang.engine import (
    FakeSglang,
    listening,
)
from tinkercloud_testing.sglang.sampling import (
    FILES,
    NEVER,
    PROMPTS,
    TENSORS,
    a_sampler,
    an_adapter,
    assert_same,
    assert_sampled,
    cleaned_up,
    publish,
)
from tinkercloud_testing.sglang.source import read_tensors
from tinkercloud_testing.small_models.models import save, tiny_qwen3_moe
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.inference.client import ServerUnreachable
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang.encoded_tensors import pickled_bucket
from tinkercloud_worker.inference.weights_folder import WeightsFolder

pytestmark = pytest.mark.slow


async def test_an_adapter_is_loaded_once_for_all_waiting_requests(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2], max_tokens=2)
    for fake in fakes:
        fake.restart()

    await asyncio.gather(*[sampler.sample("one", request) for _ in range(7)])

    # Once when it was published, once after the restart.
    assert sum(len(fake.called(TENSORS)) for fake in fakes) == 2


async def test_loading_weights_does_not_block_requests_for_others(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "one@1", an_adapter(engine, 1))
    await publish(engine, sampler, "two@1", an_adapter(engine, 2))
    await publish(engine, sampler, "base", None)
    newer = an_adapter(engine, 3)
    await engine.sampler.publish("one@2", newer)
    async with fakes[0].holding(TENSORS) as asked:
        publishing = asyncio.create_task(sampler.publish("one@2", newer))

        async with asyncio.timeout(30):
            await asked.wait()
            for version in ("one@1", "two@1", "base"):
                await assert_sampled(engine, sampler, version)

        assert not publishing.done()
    await publishing
    await assert_sampled(engine, sampler, "one@2")
    await sampler.close()


async def test_adapter_names_are_unique_across_heads(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    weights = an_adapter(engine, 1)
    first = a_sampler(fakes[:1], tmp_path / "first")
    await first.publish("one", weights)
    await first.retire("one")
    await cleaned_up(first)
    await first.publish("one", weights)
    # The first is killed rather than closed, so the engine keeps what it was given.
    second = a_sampler(fakes[:1], tmp_path / "second", generation="g2")
    for seed, version in ((2, "one"), (3, "two")):
        await publish(engine, second, version, an_adapter(engine, seed))

    given = [body["lora_name"] for body in fakes[0].called(TENSORS)]
    assert len(given) == len(set(given)) == 4
    assert len(fakes[0].adapters) == 3
    await assert_sampled(engine, second, "one")
    await asyncio.gather(first.close(), second.close())


async def test_an_adapter_that_the_engine_has_evicted_is_loaded_again(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2], stop=NEVER)
    for fake in fakes:
        await fake.evict()

    theirs = await sampler.sample("one", request)

    assert_same(theirs, await engine.sampler.sample("one", request))
    assert sum(len(fake.called(TENSORS)) for fake in fakes) == 2


async def test_files_of_a_retired_version_are_removed_even_if_its_engine_is_gone(
    engine: Engine, model_folder: Path, tmp_path: Path
) -> None:
    fake = FakeSglang(engine, model_folder)
    await engine.sampler.publish("base", None)
    async with listening(fake):
        sampler = a_sampler([fake], tmp_path, recovery_seconds=0.2)
        await sampler.publish("one", an_adapter(engine, 1))
    with pytest.raises(ServerUnreachable):
        await sampler.sample("one", a_sampling_request([1]))

    await sampler.retire("one")
    await cleaned_up(sampler)

    assert list((tmp_path / "scratch" / "adapters").iterdir()) == []
    await sampler.close()


async def test_a_retired_version_is_removed_after_its_last_request(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    await sampler.publish("one", an_adapter(engine, 1))
    running = asyncio.create_task(
        sampler.sample("one", a_sampling_request([1, 2], max_tokens=200, stop=NEVER))
    )
    await asyncio.sleep(0)

    await sampler.retire("one")
    with pytest.raises(NotFound):
        await sampler.sample("one", a_sampling_request([1]))
    [sequence] = (await running).sequences
    await cleaned_up(sampler)

    assert len(sequence.tokens) == 200
    assert [fake.adapters for fake in fakes] == [{}, {}]
    assert list((tmp_path / "scratch" / "adapters").iterdir()) == []


async def test_unused_snapshots_accumulate_neither_in_engines_nor_in_the_folder(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    weights = an_adapter(engine, 1)
    config = HeadConfig(
        head="tiny",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root="",
        scratch_dir="",
        limits=Limits(max_snapshot_bytes=3 * weights.size_bytes),
    )
    store = CheckpointStore(open_store(tmp_path.as_uri()))
    samplers = Samplers(Backend(config, engine.trainer, sampler, engine.thread, store, frozenset()))

    for step in range(8):
        await samplers.publish(SamplingSessionId("s", step), ModelId("s", 0), weights)
        await cleaned_up(sampler)
        assert sum(len(fake.adapters) for fake in fakes) == min(step + 1, 3)
        assert len(list((tmp_path / "scratch" / "adapters").iterdir())) == min(step + 1, 3)


async def test_a_closed_head_removes_its_own_files_only(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    folder = tmp_path / "volume"
    first, other = (
        a_sampler(fakes[:1], tmp_path, generation, adapters_dir=str(folder))
        for generation in ("g1", "g1-1")
    )
    for seed, sampler in enumerate((first, first, other)):
        await sampler.publish(f"model-{seed}", an_adapter(engine, seed))
    before = {path.name for path in folder.iterdir()}

    await first.close()

    assert before == {"tiny-g1-1", "tiny-g1-2", "tiny-g1-1-1"}
    assert [path.name for path in folder.iterdir()] == ["tiny-g1-1-1"]
    await other.close()
    assert list(folder.iterdir()) == []


async def test_weights_cancelled_while_being_written_leave_no_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)
    write, started, may_end = WeightsFolder.write, threading.Event(), threading.Event()

    def held_up(*args: Any) -> str:
        started.set()
        assert may_end.wait(60)
        return write(*args)

    monkeypatch.setattr(WeightsFolder, "write", held_up)
    publishing = asyncio.create_task(sampler.publish("one", an_adapter(engine, 1)))
    await asyncio.to_thread(started.wait, 60)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    may_end.set()
    await cleaned_up(sampler)

    assert list((tmp_path / "scratch" / "adapters").iterdir()) == []
    await sampler.close()


async def test_a_rejected_adapter_is_a_user_error(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    for fake in fakes:
        fake.max_lora_rank = 2

    with pytest.raises(InvalidRequest, match="with rank 4 is incompatible"):
        await sampler.publish("one", an_adapter(engine, 1))

    asked = [path for fake in fakes for path, _ in fake.calls if "load_lora" in path]
    assert asked == [TENSORS, FILES]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_adapters_are_sent_to_an_engine_without_access_to_the_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, ranks: int
) -> None:
    fakes[0].tp_size = ranks
    sampler = a_sampler(fakes[:1], tmp_path, adapters_seen=False)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    theirs = await sampler.sample("one", request)

    assert_same(theirs, await engine.sampler.sample("one", request))
    assert len(fakes[0].called(TENSORS)) == 1
    await sampler.close()


@pytest.mark.parametrize(
    ("state", "offers"),
    [
        ({"lacks": frozenset({TENSORS})}, 1),
        ({"refuses": frozenset({TENSORS})}, 1),
        ({"tp_size": None}, 0),
    ],
)
async def test_an_engine_that_rejects_tensors_gets_files_from_then_on(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state: dict[str, object], offers: int
) -> None:
    vars(fakes[0]).update(state)
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    await publish(engine, sampler, "two", an_adapter(engine, 2))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    theirs = [await sampler.sample(version, request) for version in ("one", "two")]

    assert_same(theirs[0], await engine.sampler.sample("one", request))
    assert_same(theirs[1], await engine.sampler.sample("two", request))
    assert len(fakes[0].called(TENSORS)) == offers
    assert len(fakes[0].called(FILES)) == 2
    await sampler.close()


async def test_an_engine_that_crashes_twice_on_tensors_gets_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_worker.inference.inference_server._RECOVERY_SECONDS", 0.01)
    fakes[0].ends_over = frozenset({TENSORS})
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    theirs = await sampler.sample("one", request)

    assert_same(theirs, await engine.sampler.sample("one", request))
    assert [path for path, _ in fakes[0].calls if "load_lora" in path] == [TENSORS, TENSORS, FILES]
    await sampler.close()


@pytest.mark.usefixtures("_all_is_large")
@pytest.mark.parametrize(
    ("place", "ways"),
    [
        ({}, [FILES]),
        ({"adapters_dir_there": "/nowhere"}, [FILES, TENSORS]),
        ({"adapters_seen": False}, [TENSORS]),
    ],
)
async def test_a_large_adapter_is_read_from_files_if_the_engine_has_access(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, place: dict[str, Any], ways: list[str]
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, **place)

    await sampler.publish("one", an_adapter(engine, 1))

    assert [path for path, _ in fakes[0].calls if "load_lora" in path] == ways
    await sampler.close()


async def test_adapters_of_experts_are_sent_separately_and_stacked(tmp_path: Path) -> None:
    folder = save(tiny_qwen3_moe(), tmp_path / "mixture")
    request = a_sampling_request([1, 2, 3], max_tokens=6, stop=NEVER)
    with an_engine(tiny_qwen3_moe(), tmp_path / "engine") as engine:
        fake = FakeSglang(engine, folder)
        await engine.sampler.publish("base", None)
        async with listening(fake):
            sampler = a_sampler([fake], tmp_path)
            await publish(engine, sampler, "one", an_adapter(engine, 1))

            theirs = await sampler.sample("one", request)

            assert_same(theirs, await engine.sampler.sample("one", request))
            await sampler.close()
        [body] = fake.called(TENSORS)
        sent = read_tensors(base64.b64decode(body["serialized_named_tensors"][0]))
    name = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"
    assert sent[name].shape == (24, 4)
    assert all(tensor.ndim == 2 for tensor in sent.values())


def test_tensors_of_any_dtype_are_received_unchanged() -> None:
    sent = {
        "odd": torch.randn(3).bfloat16(),
        "view": torch.randn(4, 6).T,
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }

    read = read_tensors(pickled_bucket(sent))

    assert read.keys() == sent.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in sent.items())
    assert all(read[name].dtype == tensor.dtype for name, tensor in sent.items())
