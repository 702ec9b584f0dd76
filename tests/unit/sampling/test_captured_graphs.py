"""Captured decoding steps sample the same tokens as eager ones, however the batch changes.

Without a GPU, a step is captured as the list of its tensor operations, which is equivalent to a
CUDA graph: replay does not repeat decisions made in Python.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_testing.small_models.models import (
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.engines import (
    Engine,
    a_sampling_request,
    an_engine,
    publish_adapter,
)
from tinkercloud_testing.training.recording import Operations
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingResult, StopRules
from tinkercloud_worker.torch_sampler.decode.captured_steps import Compute, GraphCapturer

MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "mixture": lambda: tiny_qwen3_moe(positions=512),
}
NEVER = StopRules(frozenset(), ())


def refuse(_compute: Compute) -> Compute:
    """Record nothing, as CUDA does where work reads its results."""
    raise RuntimeError("operation not permitted when stream is capturing")


def sampled(
    model: Callable[[], PreTrainedModel], scratch_dir: Path, graph_capturer: GraphCapturer | None
) -> list[SamplingResult]:
    """Sample from a base, adapters and a mixture of them, few at a time and many."""

    async def sample(engine: Engine) -> list[SamplingResult]:
        await engine.sampler.publish("base", None)
        await publish_adapter(engine, "one", rank=4, seed=1)
        await publish_adapter(engine, "two", rank=4, seed=2)
        await publish_adapter(engine, "wide", rank=6, seed=3)
        requests = {
            "short": a_sampling_request([1, 2, 3], max_tokens=6, seed=4, stop=NEVER),
            "group": a_sampling_request([7] * 9, num_samples=3, max_tokens=6, seed=5, stop=NEVER),
            "long": a_sampling_request([5] * 250, max_tokens=12, temperature=0.0, stop=NEVER),
        }
        apart = ["base short", "one group", "two group", "wide short", "one short", "base long"]
        together = ["base group", "one short", "wide long", "two short"]
        parts = [[each] for each in apart] + [together]
        results = [
            await asyncio.gather(
                *(engine.sampler.sample(v, requests[name]) for v, name in map(str.split, part))
            )
            for part in parts
        ]
        return [result for part in results for result in part]

    with an_engine(model(), scratch_dir, SamplerConfig(), graph_capturer=graph_capturer) as engine:
        return asyncio.run(sample(engine))


def check_equal(results: list[SamplingResult], expected: list[SamplingResult]) -> None:
    """Check that two runs drew the same."""
    pairs = [
        (ours, theirs)
        for one, other in zip(results, expected, strict=True)
        for ours, theirs in zip(one.sequences, other.sequences, strict=True)
    ]
    assert [ours.tokens for ours, _ in pairs] == [theirs.tokens for _, theirs in pairs]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [each if each == "llama" else pytest.param(each, marks=pytest.mark.long) for each in MODELS],
)
def test_captured_steps_sample_the_same_tokens_as_eager_steps(name: str, tmp_path: Path) -> None:
    operations = Operations()

    recorded = sampled(MODELS[name], tmp_path / "recorded", operations)
    computed = sampled(MODELS[name], tmp_path / "computed", None)

    check_equal(recorded, computed)
    assert 0 < operations.recorded < operations.replayed / 2


def test_steps_that_cannot_be_captured_run_eagerly(tmp_path: Path) -> None:
    refused = sampled(tiny_llama, tmp_path / "refused", refuse)
    computed = sampled(tiny_llama, tmp_path / "computed", None)

    check_equal(refused, computed)


async def test_a_long_prompt_requested_twice_at_once_is_prefilled_once(
    tmp_path: Path,
) -> None:
    prompts = [list(range(200)) * 2, list(range(200)) * 2, [7, 8, 9]]
    requests = [a_sampling_request(prompt, max_tokens=3, stop=NEVER) for prompt in prompts]
    config = SamplerConfig(prefill_chunk_tokens=2048)
    with an_engine(tiny_llama(), tmp_path, config, graph_capturer=Operations()) as engine:
        await engine.sampler.publish("base", None)

        results = await asyncio.gather(*(engine.sampler.sample("base", r) for r in requests))

    assert [result.prompt.cached_tokens for result in results] == [0, 399, 0]
    assert results[0].sequences[0].tokens == results[1].sequences[0].tokens
