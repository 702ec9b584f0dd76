"""For all families, tokens are sampled from the same logits that transformers computes without a
cache."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_testing.small_models.families import (
    ONE_BY_ONE,
    ROTARY_SWITCH,
    SCALED,
    SLOTTED,
    VISION_LANGUAGE,
    llama4,
    longrope,
)
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_testing.training.engines import a_sampling_request, an_engine
from tinkercloud_testing.training.recording import Operations
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.decode.decoding import TokenSampler
from tinkercloud_worker.torch_sampler.decode.decoding_check import check_decoding

LONG = [7 * number % 250 for number in range(15)]
PROMPTS = [[1, 2, 3], LONG, [7, 8], [*LONG[:12], 9, 8, 7, 6], LONG]
"""Prompts of different lengths; some share a prefix or are equal, and reuse cached prefixes."""
SAMPLES = 2
MAX_TOKENS = 14
CONFIG = SamplerConfig(prefill_chunk_tokens=8, max_running_sequences=5)
"""Fewer at a time than there are samples."""


async def draw(
    make: Callable[[], PreTrainedModel],
    scratch_dir: Path,
    graph_capturer: GraphCapturer | None = None,
) -> list[SamplingResult]:
    """Return what comes of all prompts, the last two of which come later than the others."""
    with an_engine(make(), scratch_dir, CONFIG, graph_capturer=graph_capturer) as engine:
        await engine.sampler.publish("base", None)

        async def sample(prompts: Sequence[list[int]]) -> list[SamplingResult]:
            requests = [
                a_sampling_request(
                    prompt,
                    num_samples=SAMPLES,
                    max_tokens=MAX_TOKENS,
                    stop=StopRules(frozenset(), ()),
                    prompt_logprobs=PromptLogprobParams(logprobs_from=1),
                )
                for prompt in prompts
            ]
            return await asyncio.gather(*(engine.sampler.sample("base", r) for r in requests))

        return [*await sample(PROMPTS[:3]), *await sample(PROMPTS[3:])]


def logprobs_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the logprobs [R, V] that follow each token of a sequence: alone, without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    logprobs: Tensor = logits.float().log_softmax(-1)
    return logprobs


def check(model: PreTrainedModel, results: Sequence[SamplingResult]) -> None:
    """Compare logprobs of prompts and samples with a model's own."""
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt.logprobs is not None
        for sequence in result.sequences:
            tokens = [*prompt, *sequence.tokens]
            assert len(tokens) == len(prompt) + MAX_TOKENS
            following = torch.tensor(tokens[1:])[:, None]
            expected = logprobs_of(model, tokens)[:-1].gather(1, following)[:, 0].numpy()
            ours = [*result.prompt.logprobs[1:], *sequence.logprobs]
            np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)


ALL = SLOTTED | ONE_BY_ONE | SCALED | VISION_LANGUAGE | {"Llama 4": llama4}


@pytest.mark.parametrize("family", ALL)
async def test_samples_of_a_family_follow_its_own_model(family: str, tmp_path: Path) -> None:
    make = ALL[family]

    results = await draw(make, tmp_path)

    check(make(), results)


@pytest.mark.parametrize("family", ["sinks", "capped attention", "windows in masks only"])
async def test_captured_steps_use_the_masks_of_a_family(family: str, tmp_path: Path) -> None:
    results = await draw(SLOTTED[family], tmp_path, Operations())

    check(SLOTTED[family](), results)


def test_only_families_that_slots_would_break_are_decoded_one_by_one() -> None:
    token_sampler = TokenSampler(byte_tokenizer())

    in_slots = [
        family
        for family, make in (SLOTTED | ONE_BY_ONE).items()
        if check_decoding(TorchBaseModel(make()), token_sampler).slotted
    ]

    assert in_slots == list(SLOTTED)


async def test_a_sequence_that_outgrows_its_rotary_positions_is_prefilled_again(
    tmp_path: Path,
) -> None:
    model = longrope()
    results = await draw(longrope, tmp_path)

    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(prompt) < ROTARY_SWITCH
        for sequence in result.sequences:
            tokens = [*prompt, *sequence.tokens]
            # Those drawn before had the positions of short sequences.
            expected = [
                float(logprobs_of(model, tokens[:end])[-1, tokens[end]])
                for end in range(len(prompt), len(tokens))
            ]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5, rtol=0)


def test_a_short_sequence_keeps_its_rotary_positions_in_a_mixed_batch() -> None:
    base = TorchBaseModel(longrope())

    assert not base.takes_packs


@pytest.mark.parametrize("family", ["hybrid, Qwen3-Next", "hybrid, Jamba", "hybrid, Zamba2"])
def test_a_family_that_rejects_packs_is_loaded_and_given_one_sequence_at_a_time(
    family: str,
) -> None:
    base = TorchBaseModel(ONE_BY_ONE[family]())

    assert not base.takes_packs
    sequence = PackedSequences(torch.tensor(LONG), (len(LONG),))
    assert base.hidden_of(sequence, ()).shape == (len(LONG), 32)
