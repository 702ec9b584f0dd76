"""Penalties, biases and min_p: what they do to a sample, and what they leave alone."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import tiny_deepseek_v3, tiny_llama
from tinkercloud_testing.training.engines import a_sampling_request, an_engine, publish_adapter
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.sampling.sampler_interface import (
    LogitChanges,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.engine.sampling.sampling_request import prepare
from tinkercloud_worker.torch_sampler.decode.token_choice import (
    SamplingParams,
    filter_logits,
    sample_tokens,
)

NEVER = StopRules(frozenset(), ())
PROMPT = [7, 9, 7, 30, 2]
CHANGES = {
    "bias": LogitChanges(bias=((40, 3.0), (41, -50.0))),
    "frequency": LogitChanges(frequency_penalty=1.5),
    "presence": LogitChanges(presence_penalty=-0.7),
    "repetition": LogitChanges(repetition_penalty=1.8),
    "all": LogitChanges(0.5, 0.5, 0.7, ((7, 2.0),)),
}
logit_rows = hnp.arrays(
    np.float32, st.integers(2, 40), elements=st.floats(-10, 10, width=32, allow_subnormal=False)
)


def changed(logits: torch.Tensor, changes: LogitChanges, sampled: list[int]) -> torch.Tensor:
    """Return changed logits, computed as the documentation says."""
    logits = logits.clone()
    for token, value in changes.bias:
        logits[token] += value
    if changes.repetition_penalty != 1.0:
        processor = RepetitionPenaltyLogitsProcessor(changes.repetition_penalty)
        logits = processor(torch.tensor([[*PROMPT, *sampled]]), logits[None])[0]
    for token, count in Counter(sampled).items():
        logits[token] -= changes.frequency_penalty * count + changes.presence_penalty
    return logits


def a_request(changes: LogitChanges, seed: int = 3, **fields: float) -> SamplingRequest:
    request = a_sampling_request(PROMPT, max_tokens=12, seed=seed, stop=NEVER, top_logprobs=3)
    return replace(request, changes=changes, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [tiny_llama, tiny_deepseek_v3])
async def test_requests_with_different_changes_in_one_batch_choose_what_each_asks_for(
    model: type, tmp_path: Path
) -> None:
    reference = model().eval()
    with an_engine(model(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        requests = [a_request(changes, temperature=0.0) for changes in CHANGES.values()]
        results = await asyncio.gather(*[engine.sampler.sample("base", r) for r in requests])

    for request, result in zip(requests, results, strict=True):
        (sequence,) = result.sequences
        with torch.no_grad():
            tokens = torch.tensor([[*PROMPT, *sequence.tokens]])
            logits = reference(tokens).logits[0, len(PROMPT) - 1 : -1]
        own = torch.log_softmax(logits, -1)
        for place, token in enumerate(sequence.tokens):
            wanted = changed(logits[place], request.changes, list(sequence.tokens[:place]))
            assert wanted[token] == pytest.approx(wanted.max().item(), abs=1e-4)
            # The logprobs are the model's own, of the logits before any change.
            assert sequence.logprobs[place] == pytest.approx(own[place, token].item(), abs=1e-4)
        assert sequence.top is not None
        top = torch.topk(own, 3).values.numpy()
        np.testing.assert_allclose(sequence.top.logprobs, top, atol=1e-4)


async def test_samples_without_changes_are_the_same_alongside_others_that_have_some(
    tmp_path: Path,
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await publish_adapter(engine, "adapter", seed=5)
        plain = a_sampling_request(PROMPT, max_tokens=12, seed=3, stop=NEVER, top_logprobs=3)
        others = [a_request(changes, seed=4) for changes in CHANGES.values()]
        alone = await engine.sampler.sample("adapter", plain)
        together, *_ = await asyncio.gather(
            *[engine.sampler.sample("adapter", each) for each in (plain, *others)]
        )

    assert together.sequences[0].tokens == alone.sequences[0].tokens


async def test_a_bias_forbids_or_forces_a_token(tmp_path: Path) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        forced = await engine.sampler.sample("base", a_request(LogitChanges(bias=((40, 100.0),))))
        everything = tuple((token, -100.0) for token in range(256) if token != 41)
        left = await engine.sampler.sample("base", a_request(LogitChanges(bias=everything)))

    assert forced.sequences[0].tokens == [40] * 12
    assert set(left.sequences[0].tokens) <= {41, *range(256, 1000)}


@given(logit_rows, st.floats(0.01, 1), st.floats(0.3, 2))
def test_min_p_keeps_what_transformers_keeps(
    logits: FloatArray, min_p: float, temperature: float
) -> None:
    row = torch.from_numpy(logits)[None]
    params = SamplingParams(temperature, 0, 1.0, min_p)
    kept = filter_logits(row, params).isfinite()
    scaled = row / temperature
    expected = MinPLogitsWarper(min_p)(torch.zeros(1, 0), scaled).isfinite()  # type: ignore[arg-type]
    at_the_limit = (scaled - scaled.max() - np.log(min_p)).abs() < 1e-5

    assert ((kept == expected) | at_the_limit).all()
    assert kept[0, row.argmax()]


def test_min_p_comes_before_top_p() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = filter_logits(logits, SamplingParams(1.0, 0, 0.5, 0.6)).isfinite()

    # Of the two that are left, the likelier one has 4/7.
    assert kept.tolist() == [[True, False, False, False]]
    assert sample_tokens(logits, [SamplingParams(1.0, 0, 1.0, 1.0)], [0.99]).tolist() == [0]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
    ],
)
def test_values_outside_the_accepted_range_are_refused_by_name(
    params: dict[str, object], name: str
) -> None:
    content = {"prompt": {"tokens": [1]}, "sampling_params": params}
    with pytest.raises((InvalidRequest, ValueError), match=name):
        prepare(SampleRequest.model_validate(content), ModelLimits(258, 100), frozenset(), 1)


def test_unused_changes_are_not_part_of_a_request_in_json() -> None:
    content = {"prompt": {"tokens": [1]}, "sampling_params": {"min_p": 0.0}}
    written = SampleRequest.model_validate(content).model_dump()["sampling_params"]

    assert written.keys() == {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
