"""Sampling a token: its distribution, and its dependence on seed, sample and position."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_worker.torch_sampler.decode.token_choice import (
    SamplingParams,
    filter_logits,
    invert,
    sample_tokens,
    uniform,
)

logit_rows = hnp.arrays(
    np.float32, st.integers(2, 40), elements=st.floats(-10, 10, width=32, allow_subnormal=False)
)
policies = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1),
)


@given(logit_rows, policies)
def test_filters_keep_the_most_likely_tokens_and_only_them(
    logits: FloatArray, params: SamplingParams
) -> None:
    filtered = filter_logits(torch.from_numpy(logits), params).numpy()
    kept = np.isfinite(filtered)

    assert logits[kept].max() == logits.max()
    if params.top_k:
        assert kept.sum() <= params.top_k
    if not kept.all():
        assert logits[kept].min() >= logits[~kept].max()
    np.testing.assert_allclose(filtered[kept], logits[kept] / params.temperature, rtol=1e-5)


@given(logit_rows, st.floats(0.05, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_have_that_probability(
    logits: FloatArray, top_p: float
) -> None:
    filtered = filter_logits(torch.from_numpy(logits), SamplingParams(1.0, 0, top_p)).numpy()
    probs = torch.softmax(torch.from_numpy(logits).double(), 0).numpy()
    kept = np.isfinite(filtered)

    assert probs[kept].sum() >= top_p - 1e-5
    if kept.sum() > 1:
        assert probs[kept].sum() - probs[kept].min() < top_p + 1e-5


@given(logit_rows, st.floats(0, 1, exclude_max=True))
def test_a_number_selects_the_token_whose_share_it_falls_in(
    logits: FloatArray, number: float
) -> None:
    probs = torch.softmax(torch.from_numpy(logits), 0)

    token = int(invert(probs.unsqueeze(0), torch.tensor([number], dtype=torch.float64))[0])

    cumulative = np.cumsum(probs.double().numpy())
    cumulative /= cumulative[-1]
    assert cumulative[token] >= number - 1e-9
    assert (cumulative[token - 1] if token else 0.0) <= number + 1e-9
    assert probs[token] > 0


def test_excluded_tokens_are_never_sampled_for_any_number() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    numbers = torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)

    assert invert(probs, numbers).tolist() == [1, 3, 3]


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    count = 4000
    numbers = [uniform(seed=1, sample=k, position=0) for k in range(count)]

    tokens = sample_tokens(logits.repeat(count, 1), [SamplingParams(1.0, 0, 1.0)] * count, numbers)

    shares = torch.bincount(tokens, minlength=4).numpy() / count
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_a_sampled_token_depends_only_on_its_own_row() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    rows = [
        SamplingParams(1.0, 0, 1.0),
        SamplingParams(0.0, 0, 1.0),
        SamplingParams(0.5, 5, 0.9),
    ] * 2
    numbers = [uniform(7, row, 3) for row in range(6)]

    together = sample_tokens(logits, rows, numbers).tolist()
    alone = [
        sample_tokens(logits[row : row + 1], [rows[row]], [numbers[row]]).item() for row in range(6)
    ]

    assert together == alone


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 10_000))
def test_numbers_are_a_function_of_seed_sample_and_position(
    seed: int, sample: int, position: int
) -> None:
    number = uniform(seed, sample, position)

    assert 0 <= number < 1
    assert number == uniform(seed, sample, position)


def test_no_two_seeds_samples_positions_and_candidates_share_a_number() -> None:
    numbers = [
        uniform(seed, sample, position, draw)
        for seed in range(8)
        for sample in range(8)
        for position in range(8)
        for draw in range(3)
    ]

    assert len(set(numbers)) == len(numbers)


def test_numbers_of_neighbouring_positions_are_independent() -> None:
    numbers = np.array(
        [[uniform(seed, 0, position) for position in range(40)] for seed in range(40)]
    )

    assert abs(np.corrcoef(numbers)[np.triu_indices(40, 1)]).mean() < 0.2
    assert numbers.mean() == pytest.approx(0.5, abs=0.03)
