"""Gradients of several adapters, computed as stacks, are those of each adapter by itself."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinkercloud_worker.lora.shared_gradients import SharedGradients

IN, OUT = 6, 9
SIZES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 4])), min_size=1, max_size=8)
"""Positions and rank of each adapter."""
Sizes = Sequence[tuple[int, int]]


def adapters(sizes: Sizes) -> list[tuple[int, int, int]]:
    ends = accumulate((length for length, _ in sizes), initial=2)
    return [(*span, rank) for span, (_, rank) in zip(pairwise(ends), sizes, strict=True)]


def values(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy, x, du and u of a pass with two more positions at each end."""
    torch.manual_seed(0)
    positions, ranks = sum(n for n, _ in sizes) + 4, sum(rank for _, rank in sizes)
    features = (OUT, IN, ranks, ranks)
    dy, x, du, u = (torch.randn(positions, each) for each in features)
    return dy, x, du, u


def alone(sizes: Sizes, dy: Tensor, x: Tensor, du: Tensor, u: Tensor) -> list[Tensor]:
    ends = list(accumulate((rank for _, rank in sizes), initial=0))
    spans = [
        (slice(a, b), slice(*c))
        for (a, b, _), c in zip(adapters(sizes), pairwise(ends), strict=True)
    ]
    of_a = [du[rows, columns].T @ x[rows] for rows, columns in spans]
    return of_a + [dy[rows].T @ u[rows, columns] for rows, columns in spans]


@given(SIZES)
@settings(deadline=None)
def test_stacked_gradients_are_those_of_each_adapter(sizes: Sizes) -> None:
    pass_values = values(sizes)

    together = SharedGradients(adapters(sizes), torch.device("cpu")).compute(*pass_values)

    for ours, own in zip(together, alone(sizes, *pass_values), strict=True):
        torch.testing.assert_close(ours, own)


@given(SIZES, st.data())
@settings(deadline=None)
def test_a_non_finite_value_reaches_the_adapter_of_its_position_only(
    sizes: Sizes, data: st.DataObject
) -> None:
    dy, x, du, u = values(sizes)
    spans = adapters(sizes)
    broken = data.draw(st.integers(0, len(spans) - 1))
    start, stop, _ = spans[broken]
    for tensor in (dy, x, du, u):
        tensor[start:stop] = torch.nan

    together = SharedGradients(spans, torch.device("cpu")).compute(dy, x, du, u)

    count = len(spans)
    for index in range(count):
        is_finite = [bool(g.isfinite().all()) for g in (together[index], together[count + index])]
        assert is_finite == [index != broken or start == stop] * 2
