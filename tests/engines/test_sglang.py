"""SGLang engines as the sampler: what is asked of them, and what happens when they fail.

The engines speak SGLang's API as its own source defines it, over our torch sampler: so answers are
compared with that sampler's, and requests with SGLang's definitions. SGLang itself needs a GPU.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.launch import BaseModelSource, HeadConfig, InferenceConfig, SamplerConfig
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_testing.engines import Engine, a_sampling_request, an_engine
from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.sglang import (
    FakeSglang,
    a_fake_sglang,
    definition,
    listening,
    read_tensors,
)
from tinkercloud_worker import metrics
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.engine.sampler import PromptQuestions, StopRules
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.inference import sglang_adapters, sglang_weights
from tinkercloud_worker.inference.client import ServerError, ServerUnreachable
from tinkercloud_worker.inference.colocation import ColocatedThread
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang_tensors import flattened

pytestmark = pytest.mark.slow

MODEL = "tiny/llama"
NEVER = StopRules(frozenset(), ())
TENSORS, FILES = "/load_lora_adapter_from_tensors", "/load_lora_adapter"
WHOLE, FOLDER = "/update_weights_from_tensor", "/update_weights_from_disk"
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9, 8, 7, 6, 5, 4]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def _counters() -> None:
    """Begin to count: a port may have been another engine's."""
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            metric.clear()


@pytest.fixture
def _all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take weights of a kilobyte for large ones."""
    monkeypatch.setattr(sglang_adapters, "_MOST_SENT_BYTES", 1000)
    monkeypatch.setattr(sglang_weights, "_MOST_SENT_BYTES", 1000)


def counted(fake: FakeSglang, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tinkercloud_engine_{name}", {"engine": fake.url, **labels})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with an_engine(tiny_llama(), tmp_path / "engine") as running:
        yield running


@pytest.fixture
async def fakes(engine: Engine, model_folder: Path) -> AsyncIterator[list[FakeSglang]]:
    """Two engines."""
    async with AsyncExitStack() as stack:
        contexts = [a_fake_sglang(engine, model_folder) for _ in range(2)]
        yield [await stack.enter_async_context(context) for context in contexts]


def a_sampler(
    fakes: list[FakeSglang], folder: Path, generation: str = "g1", **options
) -> InferenceSampler:
    urls = tuple(fake.url for fake in fakes)
    inference = InferenceConfig(urls=urls, **{"recovery_seconds": 60.0, **options})
    config = HeadConfig(
        head="tiny",
        generation=generation,
        model=BaseModelSource(name=MODEL, path=str(fakes[0].model_path)),
        token_file="",
        checkpoint_root="",
        scratch_dir=str(folder / "scratch"),
        sampler=SamplerConfig(backend="sglang", inference=inference),
    )
    return inference_sampler(config)


@pytest.fixture
async def sampler(fakes: list[FakeSglang], tmp_path: Path) -> AsyncIterator[InferenceSampler]:
    running = a_sampler(fakes, tmp_path)
    yield running
    await running.close()


def an_adapter(engine: Engine, seed: int) -> WeightsSnapshot:
    """Return an adapter that changes what the model says."""
    name = f"model-{seed}"
    engine.trainer.add_model(name, LoraConfig(rank=4, seed=seed))
    weights = engine.trainer.snapshot(name)
    for tensor in weights.tensors.values():
        tensor.normal_(0, 0.1)
    return weights


def a_whole_model(engine: Engine, scale: float) -> WeightsSnapshot:
    """Return the base model with a scaled output embedding."""
    engine.trainer.add_model(f"whole-{scale}", None)
    weights = engine.trainer.snapshot(f"whole-{scale}")
    weights.tensors["lm_head.weight"].mul_(scale)
    return weights


async def publish(engine: Engine, sampler: InferenceSampler, name: str, weights) -> None:
    await engine.sampler.publish(name, weights)
    await sampler.publish(name, weights)


def assert_same(theirs, ours) -> None:
    for their, our in zip(theirs.sequences, ours.sequences, strict=True):
        assert list(their.tokens) == list(our.tokens)
        assert their.stopped == our.stopped
        np.testing.assert_allclose(their.logprobs, our.logprobs, atol=1e-5)
        if our.top is not None:
            assert (their.top.token_ids == our.top.token_ids).all()
    for name in ("logprobs", "targets"):
        their, our = getattr(theirs.prompt, name), getattr(ours.prompt, name)
        assert (their is None) == (our is None)
        if our is not None:
            np.testing.assert_allclose(their, our, atol=1e-5)
    if ours.prompt.top is not None:
        assert (theirs.prompt.top.token_ids == ours.prompt.top.token_ids).all()
        np.testing.assert_allclose(theirs.prompt.top.logprobs, ours.prompt.top.logprobs, atol=1e-5)


async def test_samples_stops_seeds_and_prompt_scores_are_the_torch_samplers(
    engine: Engine, sampler: InferenceSampler
) -> None:
    versions = ["base", "one", "two"]
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    await publish(engine, sampler, "two", an_adapter(engine, 2))
    targets = np.array([[-1, -1], [3, -1], [40, 50], [-1, 7], [1, 2]])
    requests = [
        a_sampling_request(PROMPTS[0], num_samples=3, seed=9, temperature=0.7, top_p=0.8, top_k=50),
        a_sampling_request(PROMPTS[1], stop=NEVER, top_logprobs=3, max_tokens=20),
        a_sampling_request(PROMPTS[1], stop=StopRules(frozenset(range(60)), ()), max_tokens=40),
        a_sampling_request(PROMPTS[0], stop=StopRules(frozenset(), ("a", "b")), max_tokens=40),
        a_sampling_request(PROMPTS[2], questions=PromptQuestions(logprobs_from=3, top_k=2)),
        a_sampling_request(PROMPTS[2], questions=PromptQuestions(top_k=2, targets=targets)),
        a_sampling_request([3], questions=PromptQuestions(logprobs_from=1)),
    ]
    pairs = [(version, request) for version in versions for request in requests]

    theirs = await asyncio.gather(*[sampler.sample(*pair) for pair in pairs])
    ours = await asyncio.gather(*[engine.sampler.sample(*pair) for pair in pairs])

    for their, our in zip(theirs, ours, strict=True):
        assert_same(their, our)


async def test_a_prompt_is_computed_again_only_from_where_it_is_asked_about(
    sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("base", None)
    questions = PromptQuestions(logprobs_from=4)

    await sampler.sample("base", a_sampling_request(PROMPTS[2], questions=questions))

    bodies = [body for fake in fakes for body in fake.called("/generate")]
    assert [body["logprob_start_len"] for body in bodies].count(3) == 1


async def test_a_session_keeps_to_one_engine_and_different_ones_to_different_ones(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    for number in range(8):
        await sampler.publish(f"s:sample:{number}", an_adapter(engine, number))

    for number in range(8):
        for prompt in PROMPTS:
            await sampler.sample(f"s:sample:{number}", a_sampling_request(prompt))

    asked = [
        {body.get("lora_path") for body in fake.called("/generate")} - {None} for fake in fakes
    ]
    assert len(asked[0]) + len(asked[1]) == 8
    assert asked[0]
    assert asked[1]
    assert [set(fake.adapters) for fake in fakes] == asked


async def test_what_is_too_much_for_one_engine_goes_to_the_other(
    sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("base", None)

    requests = [a_sampling_request([1, number], max_tokens=30) for number in range(64)]
    await asyncio.gather(*[sampler.sample("base", request) for request in requests])

    assert all(len(fake.called("/generate")) > 16 for fake in fakes)


async def test_an_adapter_is_loaded_once_however_many_wait_for_it(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2], max_tokens=2)
    for fake in fakes:
        fake.restart()

    await asyncio.gather(*[sampler.sample("one", request) for _ in range(7)])

    # Once when it was published, once after the restart.
    assert sum(len(fake.called(TENSORS)) for fake in fakes) == 2


async def test_a_restarted_engine_is_waited_for_and_given_its_adapters_again(
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
    # Drawing and scoring without an adapter is how an engine is examined, each time it comes.
    assert len([body for body in fake.called("/generate") if "lora_path" not in body]) == 4


@pytest.mark.usefixtures("_counters")
async def test_requests_go_to_the_engine_that_is_left(
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


async def test_the_files_of_what_is_retired_go_though_its_engine_is_gone(
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
    await asyncio.gather(*sampler._cleaning)

    assert list((tmp_path / "scratch" / "adapters").iterdir()) == []
    await sampler.close()


async def test_when_no_engine_comes_back_the_request_ends_and_says_so(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    gone = FakeSglang(engine, fakes[0].model_path)
    async with listening(gone):
        pass
    sampler = a_sampler([gone], tmp_path, recovery_seconds=0.2)
    await sampler.publish("base", None)

    with pytest.raises(ServerUnreachable, match="no inference server answers") as raised:
        await sampler.sample("base", a_sampling_request([1]))

    assert raised.value.category == "server"
    await sampler.close()


async def test_a_retired_version_goes_when_its_last_request_has_ended(
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
    await asyncio.gather(*sampler._cleaning)

    assert len(sequence.tokens) == 200
    assert [fake.adapters for fake in fakes] == [{}, {}]
    assert list((tmp_path / "scratch" / "adapters").iterdir()) == []


async def test_an_adapter_the_engine_refuses_is_the_users_error(
    engine: Engine, sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    for fake in fakes:
        fake.max_lora_rank = 2

    with pytest.raises(InvalidRequest, match="with rank 4 is incompatible"):
        await sampler.publish("one", an_adapter(engine, 1))

    asked = [path for fake in fakes for path, _ in fake.calls if "load_lora" in path]
    assert asked == [TENSORS, FILES]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_adapters_reach_an_engine_that_sees_none_of_our_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, ranks
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
async def test_an_engine_that_takes_no_tensors_is_offered_them_once_at_most_and_given_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state, offers
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


async def test_an_engine_that_ends_over_tensors_again_is_given_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_worker.inference.engine._RECOVERY_SECONDS", 0.01)
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
async def test_a_large_adapter_goes_as_a_file_and_in_a_request_where_none_is_seen(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, place, ways
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path, **place)

    await sampler.publish("one", an_adapter(engine, 1))

    assert [path for path, _ in fakes[0].calls if "load_lora" in path] == ways
    await sampler.close()


async def test_an_engine_that_returns_logprobs_of_its_temperature_is_not_believed(
    fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    for fake in fakes:
        fake.gives_tempered_logprobs = True
    await sampler.publish("base", None)

    with pytest.raises(ServerError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        await sampler.sample("base", a_sampling_request([1]))


@pytest.mark.parametrize("state", [{}, {"tp_size": 2}, {"refuses": frozenset({WHOLE})}])
async def test_whole_models_take_turns_with_the_base_on_one_engine(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state
) -> None:
    vars(fakes[0]).update(state)
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))
    await publish(engine, sampler, "adapted", an_adapter(engine, 1))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    versions = ["base", "sharp", "adapted", "flat", "sharp", "base"]

    theirs = await asyncio.gather(*[sampler.sample(version, request) for version in versions])

    for version, their in zip(versions, theirs, strict=True):
        assert_same(their, await engine.sampler.sample(version, request))
    assert all(body["flush_cache"] for path in (WHOLE, FOLDER) for body in fakes[0].called(path))
    await sampler.close()


async def test_a_whole_model_reaches_an_engine_that_sees_none_of_our_files_in_parts(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = a_whole_model(engine, 3.0)
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", weights.size_bytes // 4)
    # Whoever was before us has left in the middle of it.
    fakes[0].is_updating = True
    sampler = a_sampler(fakes[:1], tmp_path, adapters_seen=False)
    await publish(engine, sampler, "sharp", weights)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    theirs = await sampler.sample("sharp", request)

    assert_same(theirs, await engine.sampler.sample("sharp", request))
    assert len(fakes[0].called(WHOLE)) >= 4
    assert fakes[0].called(FOLDER) == []
    assert not fakes[0].is_updating
    await sampler.close()


@pytest.mark.usefixtures("_all_is_large")
async def test_a_large_model_is_read_from_its_folder(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)

    await sampler.publish("sharp", a_whole_model(engine, 3.0))

    assert fakes[0].called(WHOLE) == []
    assert len(fakes[0].called(FOLDER)) == 1
    await sampler.close()


async def test_weights_that_came_in_part_are_never_drawn_from(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    fakes[0].refuses = frozenset({"/end_weight_update"})
    sampler = a_sampler(fakes[:1], tmp_path, adapters_seen=False)
    await publish(engine, sampler, "base", None)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    await sampler.sample("base", request)
    with pytest.raises(ServerError, match=r"failed \(500\): refused"):
        await sampler.publish("sharp", a_whole_model(engine, 3.0))

    theirs = await sampler.sample("base", request)

    assert_same(theirs, await engine.sampler.sample("base", request))
    assert [Path(body["model_path"]) for body in fakes[0].called(FOLDER)][-1] == fakes[0].model_path
    await sampler.close()


def test_tensors_of_any_dtype_arrive_as_they_were_sent() -> None:
    sent = {
        "odd": torch.randn(3).bfloat16(),
        "view": torch.randn(4, 6).T,
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }

    read = read_tensors(base64.b64encode(flattened(sent)).decode())

    assert read.keys() == sent.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in sent.items())
    assert all(read[name].dtype == tensor.dtype for name, tensor in sent.items())


async def test_an_engine_that_has_lost_a_whole_model_loads_it_again(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    fakes[0].restart()

    theirs = await sampler.sample("sharp", request)

    assert_same(theirs, await engine.sampler.sample("sharp", request))
    await sampler.close()


async def test_an_engine_that_was_out_of_reach_is_not_taken_for_one_that_began_again(
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


async def test_an_engine_that_began_again_meanwhile_is_not_told_to_take_its_memory_back(
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


@pytest.mark.parametrize("left", ["sharp", "base"])
async def test_a_head_finds_an_engine_with_the_weights_of_another_and_loads_its_own(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, left
) -> None:
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    first = a_sampler(fakes[:1], tmp_path / "first")
    await publish(engine, first, "sharp", a_whole_model(engine, 3.0))
    await first.publish("base", None)
    await first.sample(left, request)
    second = a_sampler(fakes[:1], tmp_path / "second", generation="g2")
    await second.publish("base", None)

    theirs = await second.sample("base", request)

    assert_same(theirs, await engine.sampler.sample("base", request))
    await asyncio.gather(first.close(), second.close())


async def test_colocated_engines_give_their_memory_away_while_the_trainer_computes(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes, tmp_path, colocated=True)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request([1, 2], max_tokens=30)
    thread = ColocatedThread(sampler.training, on_crash=lambda _: None)
    thread.start(thread._background)

    async def train() -> list[set[str]]:
        return await thread.run(lambda _: [set(fake.released) for fake in fakes])

    released = await asyncio.gather(
        *[sampler.sample("one", request) for _ in range(3)],
        train(),
        train(),
        *[sampler.sample("one", request) for _ in range(3)],
    )

    everything = {"kv_cache", "weights", "cuda_graph"}
    assert released[3] == released[4] == [everything, everything]
    assert [len(fake.called("/release_memory_occupation")) for fake in fakes] == [1, 1]
    for result in [*released[:3], *released[5:]]:
        assert_same(result, await engine.sampler.sample("one", request))
    await train()
    await sampler.retire("one")
    await asyncio.gather(*sampler._cleaning)
    assert [fake.adapters for fake in fakes] == [{}, {}]
    thread.stop()
    await sampler.close()


@pytest.mark.usefixtures("_counters")
async def test_what_an_engine_loads_refuses_and_forgets_is_counted(
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
    await asyncio.gather(*sampler._cleaning)

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
async def test_requests_that_run_and_that_wait_for_their_turn_are_told_apart(
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


def test_the_definitions_refuse_what_sglang_does_not_know() -> None:
    known = definition("LoadLoRAAdapterReqInput")

    known.model_validate({"lora_name": "a", "lora_path": "b"})
    for wrong in ({"lora_name": "a"}, {"lora_name": "a", "lora_path": "b", "upsert": True}):
        with pytest.raises(ValueError, match=r"lora_path|upsert"):
            known.model_validate(wrong)
