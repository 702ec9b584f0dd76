"""Sampling after images against transformers' complete models, and what prompts share."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_protocol.requests.tensors import Int32Array
from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.vision import (
    gemma_image,
    images_of,
    prompt_of,
    reference_logits,
)
from tinkercloud_testing.training.engines import a_sampling_request, an_engine
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingRequest,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.vision.prepared import PreparedImage

NEVER = StopRules(frozenset(), ())
STEPS = 6


def a_request(
    tokens: Int32Array, images: Sequence[PreparedImage], num_samples: int = 1
) -> SamplingRequest:
    request = a_sampling_request(
        tokens.tolist(),
        temperature=0.0,
        max_tokens=STEPS,
        stop=NEVER,
        num_samples=num_samples,
        prompt_logprobs=PromptLogprobParams(logprobs_from=1),
    )
    return replace(request, images=tuple(images))


def check(model: Any, request: SamplingRequest, result: SamplingResult) -> None:
    """Compare a result with passes of the complete model over all tokens."""
    for sequence in result.sequences:
        tokens = np.concatenate([request.prompt, np.array(sequence.tokens, np.int32)])
        with torch.no_grad():
            logits = reference_logits(model, tokens, request.images)[:-1]
        assert sequence.tokens == logits[-STEPS:].argmax(1).tolist()
        chosen = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
        expected = torch.log_softmax(logits, 1).gather(1, chosen)[:, 0].numpy()
        np.testing.assert_allclose(sequence.logprobs, expected[-STEPS:], atol=1e-5)
        assert result.prompt.logprobs is not None
        scores = result.prompt.logprobs[1:]
        np.testing.assert_allclose(scores, expected[:-STEPS], atol=1e-5)


@pytest.mark.parametrize("family", READS_IMAGES)
async def test_samples_and_prompt_logprobs_equal_transformers(family: str, tmp_path: Path) -> None:
    first, second = images_of(family)
    requests = [
        a_request(prompt_of(20, [first, second]), [first, second], num_samples=2),
        a_request(prompt_of(11, [], seed=1), []),
        a_request(prompt_of(second.start + second.count, [second], seed=2), [second]),
    ]
    # A chunk would end within each image.
    config = SamplerConfig(prefill_chunk_tokens=4)
    with an_engine(READS_IMAGES[family](), tmp_path, config) as engine:
        await engine.sampler.publish("base", None)
        results = await asyncio.gather(
            *[engine.sampler.sample("base", request) for request in requests]
        )

    model = READS_IMAGES[family]()
    for request, result in zip(requests, results, strict=True):
        check(model, request, result)


async def test_chunks_and_cached_prefixes_do_not_divide_images_that_see_each_other(
    tmp_path: Path,
) -> None:
    first, second = gemma_image(2, seed=1), gemma_image(6, seed=2)
    both = prompt_of(14, [first, second])
    one = both.copy()
    one[6:10] = 5
    with an_engine(
        READS_IMAGES["Gemma 3"](), tmp_path, SamplerConfig(prefill_chunk_tokens=4)
    ) as engine:
        await engine.sampler.publish("base", None)
        requests = [a_request(both, [first, second]), a_request(one, [first])]
        requests = [replace(each, prompt_logprobs=PromptLogprobParams()) for each in requests]
        results = [
            await engine.sampler.sample("base", request) for request in [*requests, *requests]
        ]

    assert [result.prompt.cached_tokens for result in results] == [0, 2, 13, 13]
    model = READS_IMAGES["Gemma 3"]()
    for request, result in zip([*requests, *requests], results, strict=True):
        [sequence] = result.sequences
        sampled = np.concatenate([request.prompt, np.array(sequence.tokens, np.int32)])
        with torch.no_grad():
            logits = reference_logits(model, sampled, request.images)[-STEPS - 1 : -1]
        chosen = torch.tensor(sequence.tokens)[:, None]
        expected = torch.log_softmax(logits, 1).gather(1, chosen)[:, 0]
        np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", READS_IMAGES)
async def test_cached_prefixes_end_before_the_first_other_image(
    family: str, tmp_path: Path
) -> None:
    first, second = images_of(family)
    other = replace(second, pixels=second.pixels[::-1] * 2, fingerprint=b"other")
    tokens = prompt_of(20, [first, second])
    prompts = {
        0: [first, second],
        second.start: [first, other],
        first.start: [replace(first, pixels=first.pixels * 2, fingerprint=b"twice"), second],
        len(tokens) - 1: [first, second],
    }
    model = READS_IMAGES[family]()
    with an_engine(READS_IMAGES[family](), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        for cached, images in prompts.items():
            request = replace(a_request(tokens, images), prompt_logprobs=PromptLogprobParams())

            result = await engine.sampler.sample("base", request)

            assert result.prompt.cached_tokens == cached
            [sequence] = result.sequences
            sampled = np.concatenate([tokens, np.array(sequence.tokens, np.int32)])
            with torch.no_grad():
                logits = reference_logits(model, sampled, images)[-STEPS - 1 : -1]
            chosen = torch.tensor(sequence.tokens)[:, None]
            expected = torch.log_softmax(logits, 1).gather(1, chosen)[:, 0]
            np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-5)


async def test_captured_steps_know_the_rotary_positions_after_images(tmp_path: Path) -> None:
    first, second = images_of("Qwen2.5-VL")
    requests = [
        a_request(prompt_of(20, [first, second]), [first, second]),
        a_request(prompt_of(11, [], seed=1), []),
    ]
    capturer = lambda compute: compute  # noqa: E731 - a CPU has no graphs
    with an_engine(READS_IMAGES["Qwen2.5-VL"](), tmp_path, graph_capturer=capturer) as engine:
        await engine.sampler.publish("base", None)
        results = await asyncio.gather(
            *[engine.sampler.sample("base", request) for request in requests]
        )

    model = READS_IMAGES["Qwen2.5-VL"]()
    for request, result in zip(requests, results, strict=True):
        check(model, request, result)
