"""The losses: formulas against NumPy, and properties for any input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import losses
from tinkercloud_worker.losses import LOSSES, LossInputs

logprob = st.floats(-8, 0, width=32)
advantage = st.floats(-3, 3, width=32)
rows = st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=8)

CONFIG = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5},
}

REFERENCE = {
    "cross_entropy": lambda lp, _q, a: -lp * a,
    "importance_sampling": lambda lp, q, a: -np.exp(lp - q) * a,
    "ppo": lambda lp, q, a: -np.minimum(np.exp(lp - q) * a, np.clip(np.exp(lp - q), 0.8, 1.2) * a),
    "cispo": lambda lp, q, a: -np.clip(np.exp(lp - q), 0, 4) * lp * a,
    "dro": lambda lp, q, a: -(lp * a - 0.025 * (lp - q) ** 2),
    "gspo": lambda lp, q, a: (
        -np.minimum(np.exp((lp - q).mean()) * a, np.clip(np.exp((lp - q).mean()), 0.7, 1.5) * a)
    ),
}


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def inputs_of(name: str, q: list[float], a: list[float], num_data: int = 1) -> LossInputs:
    """Return inputs for one loss; `a` stands for advantages, or for weights."""
    given_inputs = {
        "weights": a,
        "logprobs": q,
        "advantages": a,
        "sequence_ratio_mask": [1.0] * len(a),
    }
    values = {key: column([value] * len(a)) for key, value in CONFIG[name].items()}
    for key in LOSSES[name].inputs:
        if key in given_inputs:
            values[key] = column(given_inputs[key])
    datum_of_row = torch.arange(len(a)) * num_data // len(a)
    return LossInputs(values, datum_of_row, num_data)


@pytest.mark.parametrize("name", LOSSES)
@given(batch=rows)
def test_each_loss_is_its_formula(name: str, batch: list[tuple[float, float, float]]) -> None:
    lp, q, a = (list(part) for part in zip(*batch, strict=True))

    total, _ = losses.derivative(LOSSES[name], column(lp), inputs_of(name, q, a))

    terms = REFERENCE[name](*(np.asarray(part, np.float64) for part in (lp, q, a)))
    # If large terms cancel, their rounding errors remain.
    rounding = 2e-6 * np.abs(terms).sum()
    assert float(total) == pytest.approx(terms.sum(), rel=1e-4, abs=1e-4 + rounding)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].is_token_local])
@given(batch=rows)
def test_the_derivative_of_a_token_local_loss_can_be_taken_in_parts(
    name: str, batch: list[tuple[float, float, float]]
) -> None:
    lp, q, a = (list(part) for part in zip(*batch, strict=True))
    inputs, cut = inputs_of(name, q, a), len(lp) // 2

    total, whole = losses.derivative(LOSSES[name], column(lp), inputs)
    parts = [
        losses.derivative(LOSSES[name], column(lp)[part], inputs.rows(part))
        for part in (slice(0, cut), slice(cut, None))
    ]

    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole)
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(total), abs=1e-9)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in {"cross_entropy", "dro"}])
@given(lp=st.lists(logprob, min_size=2, max_size=6), a=advantage)
def test_on_policy_every_policy_loss_is_the_policy_gradient(
    name: str, lp: list[float], a: float
) -> None:
    _, gradient = losses.derivative(LOSSES[name], column(lp), inputs_of(name, lp, [a] * len(lp)))

    torch.testing.assert_close(gradient, torch.full_like(gradient, -a))


@given(st.lists(st.tuples(logprob, logprob), min_size=2, max_size=6))
def test_gspo_has_one_ratio_for_each_datum(pairs: list[tuple[float, float]]) -> None:
    lp, q = (list(part) for part in zip(*pairs, strict=True))
    alone = losses.derivative(LOSSES["gspo"], column(lp), inputs_of("gspo", q, [1.0] * len(lp)))
    twice = losses.derivative(
        LOSSES["gspo"], column(lp + lp), inputs_of("gspo", q + q, [1.0] * 2 * len(lp), num_data=2)
    )

    torch.testing.assert_close(twice[1], torch.cat([alone[1], alone[1]]))


def test_masked_tokens_do_not_count_in_the_gspo_ratio() -> None:
    inputs = inputs_of("gspo", [-1.0, -5.0], [1.0, 1.0])
    inputs.values["sequence_ratio_mask"][1] = 0.0

    total, _ = losses.derivative(LOSSES["gspo"], column([-0.9, -1.0]), inputs)

    assert float(total) == pytest.approx(-2 * math.exp(0.1), rel=1e-5)


nonzero = st.floats(-2, 2, width=32).filter(bool)


@given(rows=st.lists(st.tuples(logprob, logprob, nonzero, st.booleans()), min_size=1, max_size=6))
def test_any_non_zero_number_in_the_gspo_mask_marks_a_token(
    rows: list[tuple[float, float, float, bool]],
) -> None:
    lp, q = [row[0] for row in rows], [row[1] for row in rows]
    of_numbers, of_ones = (inputs_of("gspo", q, [1.0] * len(rows)) for _ in range(2))
    of_numbers.values["sequence_ratio_mask"][:, 0] = torch.tensor([row[2] * row[3] for row in rows])
    of_ones.values["sequence_ratio_mask"][:, 0] = torch.tensor([float(row[3]) for row in rows])

    got, expected = (
        losses.derivative(LOSSES["gspo"], column(lp), inputs) for inputs in (of_numbers, of_ones)
    )

    assert float(got[0]) == float(expected[0])
    assert torch.equal(got[1], expected[1])


def test_ppo_kl_averages_the_sampled_tokens_of_each_datum_and_then_the_data() -> None:
    def column(*values: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.array(values, dtype=np.float32)[:, None]

    trained = [column(-9, -1, -2), column(-9), column(-3, -1)]
    inputs = [
        {"logprobs": column(0, -0.5, -1), "advantages": column(0, 1, 0)},
        {"logprobs": column(0), "advantages": column(0)},
        {"logprobs": column(0, -2), "advantages": column(0, -1)},
    ]

    chunks = [losses.ppo_kl(trained[:2], inputs[:2]), losses.ppo_kl(trained[2:], inputs[2:])]

    assert losses.ppo_kl(trained, inputs) == pytest.approx((0.75 + 0 - 1) / 3)
    assert np.average(chunks, weights=[2, 1]) == pytest.approx(losses.ppo_kl(trained, inputs))
    assert not losses.compares_policies("cross_entropy")


def test_thresholds_may_differ_from_token_to_token() -> None:
    inputs = inputs_of("ppo", [-1.0, -1.0], [1.0, 1.0])
    inputs.values["clip_high_threshold"][1] = 3.0

    total, gradient = losses.derivative(LOSSES["ppo"], column([0.0, 0.0]), inputs)

    assert float(total) == pytest.approx(-(1.2 + math.e), rel=1e-5)
    assert gradient[0] == 0.0
    assert gradient[1] == pytest.approx(-math.e, rel=1e-5)


RATIOS = [name for name in LOSSES if name not in {"cross_entropy", "dro"}]
FAR = -1e5
"""A logprob as samplers give it of what they hold impossible."""


@pytest.mark.parametrize("name", RATIOS)
def test_an_overflowing_ratio_with_zero_advantage_has_no_effect(name: str) -> None:
    inputs = inputs_of(name, [FAR, -2.0], [0.0, 1.0], num_data=2)

    total, gradient = losses.derivative(LOSSES[name], column([-1.0, -2.0]), inputs)

    assert gradient.tolist() == [[0.0], [-1.0]]
    assert float(total) == pytest.approx(2.0 if name == "cispo" else -1.0)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_an_overflowing_ratio_is_clipped_like_any_other(name: str) -> None:
    high = CONFIG[name]["clip_high_threshold"]

    total, gradient = losses.derivative(LOSSES[name], column([-1.0]), inputs_of(name, [FAR], [1.0]))

    assert gradient.tolist() == [[0.0]]
    assert float(total) == pytest.approx(-high)


@pytest.mark.parametrize(("q", "ratio"), [(-3e38, 1.5), (3e38, 0.0)])
def test_the_gspo_ratio_is_finite_even_if_the_sum_of_a_sequence_overflows_float32(
    q: float, ratio: float
) -> None:
    total, gradient = losses.derivative(
        LOSSES["gspo"], column([-1.0, -2.0]), inputs_of("gspo", [q, q], [1.0, 1.0])
    )

    assert float(total) == pytest.approx(-2 * ratio)
    assert gradient.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_an_unclipped_overflowing_ratio_gives_a_gradient_that_steps_reject(
    name: str,
) -> None:
    advantage = -1.0

    total, gradient = losses.derivative(
        LOSSES[name], column([-1.0]), inputs_of(name, [FAR], [advantage])
    )

    assert float(total) == float(gradient) == pytest.approx(math.exp(80), rel=1e-5)
    assert not (gradient**2).isfinite().any()


def test_defaults_are_filled_in_and_a_penalty_without_one_is_required() -> None:
    for name in ("ppo", "gspo"):
        assert losses.defaults(name, {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert losses.defaults("cispo", {}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert losses.defaults("cross_entropy", {}) == {"weights": 1.0}
    with pytest.raises(InvalidRequest, match="beta"):
        losses.check_inputs("dro", list(LOSSES["dro"].inputs), {}, "data[0]")
