"""A real vLLM server as the sampler, against the torch sampler and the trainer.

Tolerances: logprobs 1e-4 relative, 1e-3 absolute; greedy tokens are equal.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tinker import types
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import FloatArray, TopLogprobs
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_testing.clients.sdk_steps import a_datum, score
from tinkercloud_testing.ranks.inference import API_KEY, VllmServer, a_vllm_server
from tinkercloud_testing.serving.servers import a_server
from tinkercloud_testing.sglang.sampling import cleaned_up, servers_of
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer, save, tiny_llama
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.sampling.sampler_interface import (
    UNCHANGED,
    LogitChanges,
    PromptLogprobParams,
    StopRules,
)
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.weight_host import HeadWeightHost

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "tiny/llama"
NEVER = StopRules(frozenset(), ())
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9, 8, 7, 6, 5, 4]]


def a_model() -> PreTrainedModel:
    # vLLM's attention on CPU needs heads of at least 32 dimensions.
    return tiny_llama(hidden_size=128)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(a_model(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def vllm(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with a_vllm_server(model_folder, MODEL, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with an_engine(a_model(), tmp_path / "engine") as running:
        yield running


def head_config(vllm: VllmServer, folder: Path, model_folder: Path, key: str = "") -> HeadConfig:
    key_file = folder / "key"
    key_file.write_text(key or API_KEY)
    inference = InferenceConfig(kind="vllm", urls=(vllm.url,), key_file=str(key_file))
    return HeadConfig(
        head="tiny",
        generation=folder.name,
        model=BaseModelSource(name=MODEL, path=str(model_folder)),
        token_file="",
        checkpoint_root="",
        scratch_dir=str(folder / "scratch"),
        sampler=SamplerConfig(backend="external", inference=inference),
    )


@pytest.fixture
async def sampler(
    vllm: VllmServer, tmp_path: Path, model_folder: Path
) -> AsyncIterator[InferenceSampler]:
    running = inference_sampler(
        head_config(vllm, tmp_path, model_folder), byte_tokenizer(), HeadWeightHost()
    )
    yield running
    await running.close()


async def publish(engine: Engine, sampler: InferenceSampler, name: str, seed: int) -> None:
    """Train an adapter for two steps, and publish it to both samplers."""
    engine.trainer.add_model(name, LoraConfig(rank=4, seed=seed))
    for step in range(2):
        batch = prepare(a_request(random_data([30, 20], seed=seed + step)), engine.trainer.limits)
        engine.trainer.forward_backward(name, batch)
        engine.trainer.optim_step(name, AdamParams(learning_rate=2e-2))
    weights = engine.trainer.copy_weights(name)
    await engine.sampler.publish(name, weights)
    await sampler.publish(name, weights)


async def adapters_of(vllm: VllmServer) -> set[str]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.get(f"{vllm.url}/v1/models") as answer,
    ):
        listed = (await answer.json())["data"]
    return {entry["id"] for entry in listed if entry["parent"] is not None}


def assert_equal_logprobs(
    ours: FloatArray | Sequence[float] | None, theirs: FloatArray | Sequence[float] | None
) -> None:
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def assert_equal_choices(ours: TopLogprobs | None, theirs: TopLogprobs | None) -> None:
    assert ours is not None
    assert theirs is not None
    assert_equal_logprobs(ours.logprobs, theirs.logprobs)
    assert (ours.token_ids == theirs.token_ids).all()


async def tokens_found_in_the_cache(vllm: VllmServer) -> float:
    """Return the number of cached prompt tokens since the server started."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.get(f"{vllm.url}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:prefix_cache_hits_total{")
    )


async def test_a_prompt_is_cached_per_version(
    engine: Engine, sampler: InferenceSampler, vllm: VllmServer
) -> None:
    await publish(engine, sampler, "one", seed=1)
    await publish(engine, sampler, "two", seed=20)
    prompt = [5 + index % 200 for index in range(300)]
    request = a_sampling_request(prompt, max_tokens=2, stop=NEVER)
    first = await sampler.sample("one", request)
    before = await tokens_found_in_the_cache(vllm)

    again = await sampler.sample("one", request)

    after = await tokens_found_in_the_cache(vllm)
    # Whole blocks are cached.
    assert after - before >= len(prompt) // 2
    assert again.prompt.cached_tokens == after - before
    another = await sampler.sample("two", request)
    assert await tokens_found_in_the_cache(vllm) == after
    assert first.prompt.cached_tokens == another.prompt.cached_tokens == 0


async def test_the_base_and_two_adapters_at_once_equal_the_torch_sampler(
    engine: Engine, sampler: InferenceSampler
) -> None:
    versions = ["base", "one", "two"]
    await engine.sampler.publish("base", None)
    await sampler.publish("base", None)
    await publish(engine, sampler, "one", seed=1)
    await publish(engine, sampler, "two", seed=20)
    prompt_logprobs = PromptLogprobParams(logprobs_from=1, top_k=3)
    assert any("lm_head" in name for name in engine.trainer.copy_weights("one").tensors)
    requests = [
        a_sampling_request(
            prompt,
            temperature=0.0,
            max_tokens=12,
            stop=NEVER,
            top_logprobs=2,
            prompt_logprobs=prompt_logprobs,
        )
        for prompt in PROMPTS
    ]
    pairs = [(version, request) for version in versions for request in requests]

    theirs = await asyncio.gather(*[sampler.sample(*pair) for pair in pairs])
    ours = await asyncio.gather(*[engine.sampler.sample(*pair) for pair in pairs])

    for their, our in zip(theirs, ours, strict=True):
        [drawn], [expected] = their.sequences, our.sequences
        assert drawn.tokens == expected.tokens
        assert_equal_logprobs(drawn.logprobs, expected.logprobs)
        assert_equal_choices(drawn.top, expected.top)
        assert_equal_logprobs(their.prompt.logprobs, our.prompt.logprobs)
        assert_equal_choices(their.prompt.top, our.prompt.top)
    firsts = [tuple(their.sequences[0].logprobs) for their in theirs[:: len(PROMPTS)]]
    assert len(set(firsts)) == 3


async def test_logprobs_are_those_of_temperature_one_at_any_sampling_temperature(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "one", seed=1)
    request = a_sampling_request(PROMPTS[0], temperature=0.5, top_p=0.9, max_tokens=10, stop=NEVER)

    [drawn] = (await sampler.sample("one", request)).sequences
    text = [*PROMPTS[0], *drawn.tokens]
    asked = a_sampling_request(
        text, max_tokens=1, prompt_logprobs=PromptLogprobParams(logprobs_from=3)
    )
    scored = (await engine.sampler.sample("one", asked)).prompt.logprobs

    assert scored is not None
    assert_equal_logprobs(drawn.logprobs, scored[3:])


async def test_targets_are_scored_at_their_positions(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "one", seed=1)
    targets = np.array([[-1, -1], [3, -1], [40, 50], [-1, 7]])
    prompt_logprobs = PromptLogprobParams(targets=targets, logprobs_from=4)
    request = a_sampling_request([5, 6, 7, 8, 9], max_tokens=1, prompt_logprobs=prompt_logprobs)

    theirs = (await sampler.sample("one", request)).prompt
    ours = (await engine.sampler.sample("one", request)).prompt

    assert theirs.targets is not None
    assert ((theirs.targets == 0) == (targets < 0)).all()
    assert_equal_logprobs(theirs.targets, ours.targets)
    assert_equal_logprobs(theirs.logprobs, ours.logprobs)


async def test_sample_k_uses_seed_plus_k(sampler: InferenceSampler) -> None:
    await sampler.publish("base", None)

    group = await sampler.sample(
        "base", a_sampling_request([1, 2], num_samples=3, seed=10, max_tokens=10, stop=NEVER)
    )
    singles = [
        await sampler.sample(
            "base", a_sampling_request([1, 2], seed=10 + k, max_tokens=10, stop=NEVER)
        )
        for k in range(3)
    ]

    tokens = [tuple(sequence.tokens) for sequence in group.sequences]
    assert tokens == [tuple(single.sequences[0].tokens) for single in singles]
    assert len(set(tokens)) == 3


async def test_a_top_k_beyond_the_vocabulary_samples_from_all_tokens(
    sampler: InferenceSampler,
) -> None:
    await sampler.publish("base", None)
    all_tokens, *more = [
        (await sampler.sample("base", a_sampling_request([1, 2], top_k=top_k, stop=NEVER)))
        for top_k in (0, (1 << 31) - 1, 1 << 31, 1 << 70)
    ]

    for drawn in more:
        assert drawn.sequences[0].tokens == all_tokens.sequences[0].tokens


async def test_several_samples_at_temperature_zero_are_equal(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await engine.sampler.publish("base", None)
    await sampler.publish("base", None)
    request = a_sampling_request(
        PROMPTS[0], num_samples=3, temperature=0.0, max_tokens=10, stop=NEVER, top_logprobs=2
    )

    theirs = (await sampler.sample("base", request)).sequences
    ours = (await engine.sampler.sample("base", request)).sequences

    assert len(theirs) == len(ours) == 3
    for their, our in zip(theirs, ours, strict=True):
        assert their.tokens == our.tokens
        assert_equal_logprobs(their.logprobs, our.logprobs)
        assert_equal_choices(their.top, our.top)


def text_of(tokens: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(tokens)))


async def test_stop_tokens_and_strings_end_a_sequence_and_stay_in_it(
    sampler: InferenceSampler,
) -> None:
    await sampler.publish("base", None)
    free = a_sampling_request(PROMPTS[0], temperature=0.0, max_tokens=40, stop=NEVER)
    [whole] = (await sampler.sample("base", free)).sequences
    token = whole.tokens[7]
    # Most single bytes are not characters.
    texts = [text_of([drawn]) for drawn in whole.tokens[3:]]
    string = next(text for text in texts if len(text) == 1 and text.isascii())

    by_token = a_sampling_request(
        PROMPTS[0], temperature=0.0, max_tokens=40, stop=StopRules(frozenset({token}), ())
    )
    by_string = a_sampling_request(
        PROMPTS[0], temperature=0.0, max_tokens=40, stop=StopRules(frozenset(), (string,))
    )
    [ended] = (await sampler.sample("base", by_token)).sequences
    [cut] = (await sampler.sample("base", by_string)).sequences

    assert [whole.stopped, ended.stopped, cut.stopped] == [False, True, True]
    assert ended.tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert string in text_of(cut.tokens)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert string not in text_of(cut.tokens[:-1])


@pytest.mark.parametrize("stop", ["<|end|><|end|>", "end|><|", "<|end|>"])
async def test_special_tokens_are_part_of_the_text_that_vllm_searches(
    engine: Engine, sampler: InferenceSampler, stop: str
) -> None:
    await engine.sampler.publish("base", None)
    await sampler.publish("base", None)
    always = LogitChanges(bias=((EOS_TOKEN_ID, 100.0),))
    request = replace(
        a_sampling_request(PROMPTS[0], stop=StopRules(frozenset(), (stop,))), changes=always
    )

    # Without the sampler, which cuts what a server has sampled beyond a stop string.
    [server] = servers_of(sampler).values()
    [theirs] = (await server.dialect.sample(request, None)).sequences
    [ours] = (await engine.sampler.sample("base", request)).sequences

    expected = [EOS_TOKEN_ID] * (1 if stop == "<|end|>" else 2)
    assert (list(theirs.tokens), theirs.stopped) == (expected, True)
    assert (list(ours.tokens), ours.stopped) == (expected, True)


async def test_penalties_and_biases_change_samples_but_not_their_logprobs(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "one", seed=1)
    greedy = a_sampling_request(PROMPTS[2], temperature=0.0, max_tokens=40, stop=NEVER)
    seen = set()

    for changes in (
        UNCHANGED,
        LogitChanges(frequency_penalty=1.5),
        LogitChanges(presence_penalty=1.5),
        LogitChanges(repetition_penalty=1.5),
        LogitChanges(bias=((40, 3.0), (41, -100.0))),
    ):
        request = replace(greedy, changes=changes)
        [theirs] = (await sampler.sample("one", request)).sequences
        [ours] = (await engine.sampler.sample("one", request)).sequences
        assert list(theirs.tokens) == list(ours.tokens)
        assert_equal_logprobs(theirs.logprobs, ours.logprobs)
        seen.add(tuple(theirs.tokens))

    assert len(seen) == 5


async def test_min_p_leaves_only_likely_tokens(sampler: InferenceSampler) -> None:
    await sampler.publish("base", None)
    greedy = a_sampling_request(PROMPTS[0], temperature=0.0, stop=NEVER)
    likeliest = replace(a_sampling_request(PROMPTS[0], temperature=2.0, stop=NEVER), min_p=1.0)

    [expected] = (await sampler.sample("base", greedy)).sequences
    [drawn] = (await sampler.sample("base", likeliest)).sequences

    assert drawn.tokens == expected.tokens


async def test_a_lost_adapter_is_reloaded(
    engine: Engine, sampler: InferenceSampler, vllm: VllmServer
) -> None:
    await publish(engine, sampler, "one", seed=1)
    request = a_sampling_request(PROMPTS[0], max_tokens=4, stop=NEVER)
    before = await sampler.sample("one", request)
    [adapter] = await adapters_of(vllm)
    [its_engine] = servers_of(sampler).values()
    await its_engine.dialect.unload_adapter(adapter)
    assert await adapters_of(vllm) == set()

    after = await sampler.sample("one", request)

    assert after.sequences[0].tokens == before.sequences[0].tokens
    assert await adapters_of(vllm) == {adapter}


async def test_a_retired_version_is_removed_from_server_and_folder(
    engine: Engine, sampler: InferenceSampler, vllm: VllmServer, tmp_path: Path
) -> None:
    await publish(engine, sampler, "one", seed=1)
    await publish(engine, sampler, "two", seed=20)
    exported = await sampler.export("one")
    assert exported is not None
    assert exported.tensors.keys() == engine.trainer.copy_weights("one").tensors.keys()

    await sampler.retire("one")
    await cleaned_up(sampler)

    left = await adapters_of(vllm)
    assert len(left) == 1
    assert {path.name for path in (tmp_path / "scratch" / "adapters").iterdir()} == left
    with pytest.raises(NotFound, match="save the weights again"):
        await sampler.sample("one", a_sampling_request([1]))
    await sampler.close()
    assert await adapters_of(vllm) == set()


async def test_unsupported_parameters_are_rejected_by_name(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await sampler.publish("base", None)
    refused = {
        "prompt_alt_tokens_k": a_sampling_request(
            [1, 2, 3], prompt_logprobs=PromptLogprobParams(alternatives_k=2)
        ),
        "max allowed: 20": a_sampling_request([1, 2, 3], top_logprobs=50),
    }

    for words, request in refused.items():
        with pytest.raises(InvalidRequest, match=words):
            await sampler.sample("base", request)
    engine.trainer.add_model("wide", LoraConfig(rank=32))
    with pytest.raises(InvalidRequest, match="rank"):
        await sampler.publish("wide", engine.trainer.copy_weights("wide"))
    engine.trainer.add_model("whole", None)
    with pytest.raises(InvalidRequest, match="external inference server"):
        await sampler.publish("whole", engine.trainer.copy_weights("whole"))


async def test_a_wrong_key_is_reported_as_a_setting_of_the_head(
    vllm: VllmServer, tmp_path: Path, model_folder: Path
) -> None:
    sampler = inference_sampler(
        head_config(vllm, tmp_path, model_folder, key="wrong"), byte_tokenizer(), HeadWeightHost()
    )
    await sampler.publish("base", None)

    with pytest.raises(ServerError, match="key_file"):
        await sampler.sample("base", a_sampling_request([1, 2]))
    await sampler.close()


def test_the_sdk_samples_from_just_trained_weights(
    vllm: VllmServer, model_folder: Path, tmp_path: Path
) -> None:
    settings = {
        "TINKERCLOUD_SAMPLER__BACKEND": "external",
        "TINKERCLOUD_SAMPLER__INFERENCE__KIND": "vllm",
        "TINKERCLOUD_SAMPLER__INFERENCE__URLS": f'["{vllm.url}"]',
        "TINKERCLOUD_SAMPLER__INFERENCE__KEY_FILE": str(vllm.key_file),
    }
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with a_server(tmp_path, {MODEL: model_folder}, settings) as server:
        training = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
        untrained = training.save_weights_and_get_sampling_client().result()
        for _ in range(4):
            passed = training.forward_backward([a_datum()], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            passed.result()
        trained = training.save_weights_and_get_sampling_client().result()

        params = types.SamplingParams(max_tokens=6, stop=[], temperature=0.7, seed=3)
        sequence = trained.sample(prompt, 1, params).result().sequences[0]
        before = untrained.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
        after = trained.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
        scored = score(training, [5, 6, 7, *sequence.tokens])
        loaded = asyncio.run(adapters_of(vllm))

    assert before[3] is not None
    assert after[3] is not None
    assert after[3] > before[3] + 0.1
    assert_equal_logprobs(sequence.logprobs, scored[2:])
    assert len(loaded) == 2
