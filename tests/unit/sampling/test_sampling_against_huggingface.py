"""The torch sampler against Hugging Face generation and against the trainer's own logprobs."""

import asyncio
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_protocol.requests.tensors import Datum, FloatArray
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_request
from tinkercloud_testing.small_models.models import (
    tiny_deepseek_v3,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
)
from tinkercloud_testing.training.engines import (
    Engine,
    a_sampling_request,
    an_engine,
    publish_adapter,
)
from tinkercloud_testing.training.recording import Operations
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingResult,
    StopRules,
)

MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "deepseek v3": tiny_deepseek_v3,
}
PROMPTS = [[1, 2, 3], list(range(40)), [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
NEVER = StopRules(frozenset(), ())


def trainer_logprobs(
    engine: Engine, model_id: str, prompt: list[int], tokens: list[int]
) -> FloatArray:
    """Return the trainer's logprobs of `tokens` after `prompt`."""
    ids = np.asarray([*prompt, *tokens], dtype=np.int32)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:].astype(np.int64)})
    batch = prepare(a_request([datum], forward_only=True), engine.trainer.limits)
    output = engine.trainer.forward(model_id, batch)
    return output.logprobs[0][len(prompt) - 1 :]


@pytest.mark.parametrize("name", MODELS)
async def test_greedy_samples_of_staggered_requests_equal_generate(
    name: str, tmp_path: Path
) -> None:
    reference = MODELS[name]().eval()
    with an_engine(MODELS[name](), tmp_path, SamplerConfig(prefill_chunk_tokens=16)) as engine:
        await engine.sampler.publish("base", None)

        async def sample(prompt: list[int], delay: float) -> SamplingResult:
            await asyncio.sleep(delay)
            request = a_sampling_request(prompt, temperature=0.0, max_tokens=12, stop=NEVER)
            return await engine.sampler.sample("base", request)

        results = await asyncio.gather(*[sample(p, 0.01 * i) for i, p in enumerate(PROMPTS)])

    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert result.sequences[0].tokens == expected.tolist()


@pytest.mark.parametrize("name", MODELS)
async def test_sampling_logprobs_equal_training_logprobs(name: str, tmp_path: Path) -> None:
    with an_engine(MODELS[name](), tmp_path) as engine:
        await publish_adapter(engine, "adapter", seed=5)

        request = a_sampling_request(PROMPTS[1], max_tokens=20, temperature=0.7, stop=NEVER)
        (sequence,) = (await engine.sampler.sample("adapter", request)).sequences
        expected = trainer_logprobs(engine, "adapter-5", PROMPTS[1], list(sequence.tokens))

    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)


async def test_tempered_logprobs_are_those_of_the_distribution_at_the_temperature(
    tmp_path: Path,
) -> None:
    """Importance weights of samples at T: the model's own logprobs less these."""
    prompt, temperatures = PROMPTS[1], (0.7, 1.0, 1.8, 0.0)
    config = SamplerConfig(sampled_logprobs="tempered")
    with an_engine(tiny_llama(), tmp_path, config) as engine:
        await engine.sampler.publish("base", None)
        results = await asyncio.gather(
            *[
                engine.sampler.sample(
                    "base",
                    a_sampling_request(
                        prompt,
                        max_tokens=12,
                        temperature=each,
                        top_k=50,
                        stop=NEVER,
                        top_logprobs=3,
                    ),
                )
                for each in temperatures
            ]
        )

    reference = tiny_llama().eval()
    for temperature, result in zip(temperatures, results, strict=True):
        (sequence,) = result.sequences
        with torch.no_grad():
            tokens = torch.tensor([[*prompt, *sequence.tokens]])
            logits = reference(tokens).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits / (temperature or 1.0), -1)
        expected = distribution.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-5)
        assert sequence.top is not None
        top = torch.topk(distribution, 3).values.numpy()
        np.testing.assert_allclose(sequence.top.logprobs, top, atol=1e-5)


async def test_rows_of_different_adapters_in_one_batch_do_not_touch_each_other(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        versions = ["one", "two", "base"]
        await publish_adapter(engine, "one", seed=1)
        await publish_adapter(engine, "two", seed=2)
        await engine.sampler.publish("base", None)
        request = a_sampling_request([1, 2, 3], max_tokens=16, seed=4, stop=NEVER)

        alone = [await engine.sampler.sample(version, request) for version in versions]
        together = await asyncio.gather(*[engine.sampler.sample(v, request) for v in versions])

    assert len({tuple(result.sequences[0].tokens) for result in alone}) == 3
    for one, other in zip(alone, together, strict=True):
        assert one.sequences[0].tokens == other.sequences[0].tokens
        np.testing.assert_allclose(
            one.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-5
        )


async def test_samples_depend_on_seed_and_index_alone_and_consecutive_seeds_share_none(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)

        async def tokens(num_samples: int, seed: int) -> list[tuple[int, ...]]:
            request = a_sampling_request(
                [1, 2], num_samples=num_samples, seed=seed, max_tokens=10, stop=NEVER
            )
            result = await engine.sampler.sample("base", request)
            return [tuple(sequence.tokens) for sequence in result.sequences]

        groups = [await tokens(3, seed) for seed in (10, 11, 12)]
        fewer = [await tokens(2, seed) for seed in (10, 11, 12)]

    assert fewer == [group[:2] for group in groups]
    assert len({sample for group in groups for sample in group}) == 9


async def test_more_samples_than_slots_all_finish(tmp_path: Path) -> None:
    with an_engine(tiny_llama(), tmp_path, SamplerConfig(max_running_sequences=2)) as engine:
        await engine.sampler.publish("base", None)

        request = a_sampling_request([1], num_samples=7, max_tokens=5, stop=NEVER)
        result = await engine.sampler.sample("base", request)

    assert [len(sequence.tokens) for sequence in result.sequences] == [5] * 7


async def test_a_prompt_reuses_the_common_prefix_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    prompt = list(range(30))
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        request = a_sampling_request([*prompt, 77], max_tokens=8, stop=NEVER)

        fresh = await engine.sampler.sample("base", request)
        again = await engine.sampler.sample("base", request)
        branch = await engine.sampler.sample(
            "base", a_sampling_request([*prompt, 78, 79], max_tokens=8, stop=NEVER)
        )
        await engine.sampler.retire("base")
        await engine.sampler.publish("base2", None)
        branch_alone = await engine.sampler.sample(
            "base2", a_sampling_request([*prompt, 78, 79], max_tokens=8, stop=NEVER)
        )

    assert [fresh.prompt.cached_tokens, again.prompt.cached_tokens] == [0, 30]
    assert [branch.prompt.cached_tokens, branch_alone.prompt.cached_tokens] == [30, 0]
    assert again.sequences[0].tokens == fresh.sequences[0].tokens
    assert branch.sequences[0].tokens == branch_alone.sequences[0].tokens


async def test_stop_tokens_and_strings_end_a_sequence_and_stay_in_it(tmp_path: Path) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        free = a_sampling_request([65, 66], max_tokens=40, temperature=0.0, stop=NEVER)
        tokens = list((await engine.sampler.sample("base", free)).sequences[0].tokens)
        stop_token = tokens[5]
        first = tokens.index(stop_token)

        stopped = a_sampling_request(
            [65, 66], max_tokens=40, temperature=0.0, stop=StopRules(frozenset({stop_token}), ())
        )
        (sequence,) = (await engine.sampler.sample("base", stopped)).sequences

    assert list(sequence.tokens) == tokens[: first + 1]
    assert sequence.stopped


async def test_all_prompt_scores_equal_those_of_full_logits(tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    targets = np.array([[-1, -1], [2, 3], [-1, -1], [4, 5], [6, -1]], dtype=np.int64)
    reference = tiny_llama().eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1).numpy()
    with an_engine(tiny_llama(), tmp_path, SamplerConfig(prefill_chunk_tokens=4)) as engine:
        await engine.sampler.publish("base", None)
        prompt_logprobs = PromptLogprobParams(
            logprobs_from=3, top_k=4, targets=targets, alternatives_k=3
        )

        request = a_sampling_request(
            prompt, max_tokens=1, top_logprobs=2, prompt_logprobs=prompt_logprobs
        )
        result = await engine.sampler.sample("base", request)
        of_targets = a_sampling_request(
            prompt, max_tokens=1, prompt_logprobs=PromptLogprobParams(targets=targets)
        )
        targets_alone = (await engine.sampler.sample("base", of_targets)).prompt.targets

    scores, top = result.prompt, result.sequences[0].top
    assert scores.logprobs is not None
    assert scores.top is not None
    assert scores.targets is not None
    assert scores.alternatives is not None
    assert top is not None
    assert np.isnan(scores.logprobs[:3]).all()
    expected = [logprobs[i - 1, prompt[i]] for i in range(3, 6)]
    np.testing.assert_allclose(scores.logprobs[3:], expected, atol=1e-5)
    np.testing.assert_allclose(
        scores.top.logprobs[3:], -np.sort(-logprobs[2:5], axis=1)[:, :4], atol=1e-5
    )
    assert (scores.top.logprobs[:3] == -99999.0).all()
    for row, column in np.ndindex(*targets.shape):
        wanted = targets[row, column]
        got = scores.targets[row, column]
        assert got == 0.0 if wanted < 0 else abs(got - logprobs[row, wanted]) < 1e-5
    assert targets_alone is not None
    np.testing.assert_allclose(targets_alone, scores.targets, atol=1e-5)
    drawn, drawn_logprobs = scores.alternatives
    np.testing.assert_allclose(
        drawn_logprobs, np.take_along_axis(logprobs[:-1], drawn, axis=1), atol=1e-5
    )
    np.testing.assert_allclose(top.logprobs[0], -np.sort(-logprobs[-1])[:2], atol=1e-5)


@pytest.mark.parametrize("graph_capturer", [None, Operations()], ids=["computed", "recorded"])
async def test_the_last_token_of_the_context_can_be_sampled_and_all_of_it_scored(
    tmp_path: Path, graph_capturer: Operations | None
) -> None:
    reference = tiny_llama().eval()
    length = reference.config.max_position_embeddings
    prompt = [7 * position % 250 for position in range(length - 12)]
    config = SamplerConfig(max_cached_tokens=length)
    with an_engine(tiny_llama(), tmp_path, config, graph_capturer=graph_capturer) as engine:
        await engine.sampler.publish("base", None)

        to_the_end = a_sampling_request(prompt, max_tokens=13, seed=1, stop=NEVER)
        (drawn,) = (await engine.sampler.sample("base", to_the_end)).sequences
        seen = [*prompt, *drawn.tokens[:-1]]
        score = a_sampling_request(
            seen, max_tokens=1, prompt_logprobs=PromptLogprobParams(logprobs_from=1)
        )
        scored = await engine.sampler.sample("base", score)
        with pytest.raises(InvalidRequest, match="holds at most 512"):
            await engine.sampler.sample(
                "base", a_sampling_request(prompt, max_tokens=14, stop=NEVER)
            )

    assert len(seen) == length
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([seen])).logits[0], -1).numpy()
    tokens = np.asarray([*seen, drawn.tokens[-1]])
    expected = np.take_along_axis(logprobs, tokens[1:, None], 1)[:, 0]
    np.testing.assert_allclose(drawn.logprobs, expected[-13:], atol=1e-5)
    assert scored.prompt.logprobs is not None
    np.testing.assert_allclose(scored.prompt.logprobs[1:], expected[:-1], atol=1e-5)
    assert len(scored.sequences[0].tokens) == 1


async def test_an_older_version_keeps_its_weights_even_after_being_spilled(tmp_path: Path) -> None:
    with an_engine(tiny_llama(), tmp_path, max_sampler_bytes=1) as engine:
        await publish_adapter(engine, "old", seed=1)
        request = a_sampling_request([1, 2, 3], max_tokens=12, stop=NEVER)
        before = await engine.sampler.sample("old", request)

        await publish_adapter(engine, "new", seed=2)
        new = await engine.sampler.sample("new", request)
        after = await engine.sampler.sample("old", request)

    assert list(tmp_path.iterdir())
    assert after.sequences[0].tokens == before.sequences[0].tokens
    assert new.sequences[0].tokens != before.sequences[0].tokens


@pytest.mark.parametrize("sampled_logprobs", ["model", "tempered"])
async def test_a_logprob_is_bit_for_bit_that_of_the_same_token_among_the_likeliest(
    sampled_logprobs: Literal["model", "tempered"], tmp_path: Path
) -> None:
    config = SamplerConfig(sampled_logprobs=sampled_logprobs)
    with an_engine(tiny_qwen3(), tmp_path, config) as engine:
        await engine.sampler.publish("base", None)
        request = a_sampling_request(
            PROMPTS[1],
            num_samples=3,
            max_tokens=20,
            temperature=0.7,
            stop=NEVER,
            top_logprobs=100,
            prompt_logprobs=PromptLogprobParams(logprobs_from=1, top_k=100),
        )
        result = await engine.sampler.sample("base", request)

    assert result.prompt.logprobs is not None
    scored = [(each.tokens, each.logprobs, each.top, 0) for each in result.sequences]
    scored.append((PROMPTS[1], list(result.prompt.logprobs), result.prompt.top, 1))
    compared = 0
    for tokens, logprobs, top, first in scored:
        assert top is not None
        for place in range(first, len(tokens)):
            [same] = np.flatnonzero(top.token_ids[place] == tokens[place])[:1].tolist() or [None]
            if same is not None:
                compared += 1
                assert np.float32(logprobs[place]) == top.logprobs[place][same]
    assert compared > 30
