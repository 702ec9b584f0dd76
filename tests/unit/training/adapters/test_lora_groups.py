"""Small requests of several adapters are multiplied together, with the results of each alone."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinkercloud_worker.lora.deltas import DeltaSpans, LoraDelta, add_deltas
from tinkercloud_worker.lora.groups import groups_of

IN, OUT = 24, 40
SPANS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 8]), st.sampled_from([0.5, 2.0])),
    min_size=1,
    max_size=8,
).filter(lambda spans: any(rank for _, rank, _ in spans))
"""Positions, rank (0: not adapted) and scale of each request of a pass."""
Spans = Sequence[tuple[int, int, float]]


def adapters(spans: Spans) -> DeltaSpans:
    """Return an adapter for each span, with a gradient from before."""
    torch.manual_seed(0)
    ends = accumulate((length for length, _, _ in spans), initial=0)
    parts: list[tuple[slice, LoraDelta | None]] = []
    for (start, stop), (_, rank, scale) in zip(pairwise(ends), spans, strict=True):
        a, b = torch.randn(rank, IN) / 5, torch.randn(OUT, rank) / 3
        for master in (a, b):
            master.requires_grad_().grad = torch.ones_like(master)
        parts.append((slice(start, stop), LoraDelta(a, b, scale) if rank else None))
    return parts


def computed(x: Tensor, y: Tensor, parts: DeltaSpans) -> list[Tensor]:
    """Return the output of one pass, and the gradients of x, y and all adapters."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    output = add_deltas(x, y, parts)
    output.square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    masters = [master for _, delta in parts if delta for master in (delta.a, delta.b)]
    return [output.detach(), x.grad, y.grad, *(m.grad for m in masters if m.grad is not None)]


def computed_alone(x: Tensor, y: Tensor, parts: DeltaSpans) -> list[Tensor]:
    """Return the same from a pass for each span."""
    outputs: list[list[Tensor]] = []
    for rows, delta in parts:
        if delta is None:
            own = y[rows]
            outputs.append([own, torch.zeros_like(x[rows]), 2 * own])
        else:
            outputs.append(computed(x[rows], y[rows], [(slice(0, len(x[rows])), delta)]))
    of_positions = [torch.cat([each[kind] for each in outputs]) for kind in range(3)]
    return of_positions + [tensor for each in outputs for tensor in each[3:]]


@given(SPANS)
@settings(deadline=None, max_examples=150)
def test_adapters_together_compute_what_each_computes_alone(spans: Spans) -> None:
    torch.manual_seed(1)
    positions = sum(length for length, _, _ in spans)
    x, y = torch.randn(positions, IN), torch.randn(positions, OUT)

    together = computed(x, y, adapters(spans))

    for ours, alone in zip(together, computed_alone(x, y, adapters(spans)), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6 * _size(alone))


def _size(tensor: Tensor) -> float:
    return float(tensor.norm()) + 1.0


def test_adapters_that_train_only_one_half_keep_the_other_without_gradient() -> None:
    parts = adapters([(4, 2, 1.0), (4, 2, 1.0)])
    (_, first), (_, second) = parts
    assert first is not None
    assert second is not None
    first.a.grad = second.b.grad = None

    computed(torch.randn(8, IN), torch.randn(8, OUT), parts)

    assert first.a.grad is None
    assert second.b.grad is None
    assert first.b.grad is not None
    assert not torch.equal(first.b.grad, torch.ones_like(first.b))


def test_a_non_finite_value_stays_with_its_adapter() -> None:
    parts = adapters([(5, 2, 1.0), (3, 4, 2.0), (4, 4, 2.0)])
    x, y = torch.randn(12, IN), torch.randn(12, OUT)
    x[0, 0] = torch.nan
    x[5, 3] = torch.inf

    output, dx, _, *gradients = computed(x, y, parts)

    assert output[8:].isfinite().all()
    assert dx[8:].isfinite().all()
    assert [bool(each.isfinite().all()) for each in gradients[-2:]] == [True, True]
    assert not gradients[0].isfinite().all()


def test_an_adapter_alone_computes_the_bits_of_the_plain_formula() -> None:
    ((rows, delta),) = parts = adapters([(7, 4, 2.0)])
    assert delta is not None
    torch.manual_seed(2)
    x, y = torch.randn(7, IN), torch.randn(7, OUT)

    output, dx, dy, da, db = computed(x, y, parts)

    a, b = delta.a.detach(), delta.b.detach()
    assert rows == slice(0, 7)
    assert torch.equal(output, y.clone().addmm_(x @ a.T, b.T, alpha=2.0))
    assert torch.equal(da, torch.ones_like(a).addmm_((dy @ b).T, x, alpha=2.0))
    assert torch.equal(db, torch.ones_like(b).addmm_(dy.T, x @ a.T, alpha=2.0))
    assert torch.equal(dx, torch.zeros_like(x).addmm_(dy @ b, a, alpha=2.0))


def test_requests_of_equal_sizes_form_one_group() -> None:
    assert groups_of(((16, 8),) * 8) == (tuple(range(8)),)


def test_a_large_request_is_not_padded_against_small_ones() -> None:
    assert groups_of(((16, 8), (2000, 8), (12, 8), (16, 4))) == ((0, 2, 3), (1,))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 64)), min_size=1, max_size=12))
def test_each_adapter_is_in_exactly_one_group_and_padding_is_bounded(
    sizes: list[tuple[int, int]],
) -> None:
    groups = groups_of(tuple(sizes))

    assert sorted(member for group in groups for member in group) == list(range(len(sizes)))
    for group in (group for group in groups if len(group) > 1):
        own = [sizes[member] for member in group]
        computed_values = len(own) * max(n for n, _ in own) * max(r for _, r in own)
        assert computed_values < 2 * sum(n * r for n, r in own)
