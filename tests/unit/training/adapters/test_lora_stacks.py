"""Adapters that share a half-precision pass compute what each would by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tinkercloud_worker.lora.adapters import Target, layout
from tinkercloud_worker.lora.parameters import Trainable
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment
from tinkercloud_worker.lora.stacks import LoraProducts, _Places

LAYERS = (Target("first", 6, 9, "mlp"), Target("second", 9, 6, "attention"))
SIZES = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 4]), st.integers(0, 1)),
    min_size=1,
    max_size=8,
)
"""Positions of each adapter, its rank, and positions of the base after it."""
Sizes = Sequence[tuple[int, int, int]]
DTYPE = torch.bfloat16


@dataclass
class Run:
    """An adapter of both layers, or of the first one, and its positions."""

    rows: slice
    weights: ActiveWeights

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all its tensors, and set them to zero."""
        tensors = list(self.weights.tensors.values())
        found = [grad.clone() for tensor in tensors if (grad := tensor.grad) is not None]
        for tensor in tensors:
            assert tensor.grad is not None
            tensor.grad.zero_()
        return found


def adapter(rank: int, *, layers: Sequence[Target], is_flat: bool) -> ActiveWeights:
    """Return a random adapter; its tensors are views of one vector, or are not known to be."""
    trainable = Trainable(layout(layers, rank))
    trainable.flat.data.uniform_(-0.5, 0.5)
    scale = 4.0 / rank
    return ActiveWeights(trainable.tensors, scale, trainable if is_flat else None)


def runs(sizes: Sizes, *, is_flat: bool, count: Sequence[int]) -> tuple[list[Run], int]:
    """Return the adapters of a pass with two positions of the base before them, and its length."""
    torch.manual_seed(0)
    ends = list(accumulate((length + base for length, _, base in sizes), initial=2))
    found = [
        Run(
            slice(start, stop - base),
            adapter(rank, layers=LAYERS[: count[index % len(count)]], is_flat=is_flat),
        )
        for index, ((start, stop), (_, rank, base)) in enumerate(
            zip(pairwise(ends), sizes, strict=True)
        )
    ]
    return found, ends[-1]


def computed(present: Sequence[Run], x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of both layers, and the gradients of the input and of all adapters."""
    products = LoraProducts([WeightSegment(run.rows, run.weights) for run in present])
    x = x.clone().requires_grad_()
    total = x
    for layer, weight in zip(LAYERS, weights, strict=True):
        if products.adapts(layer):
            total = products.linear(layer, total, weight, None)
        else:
            total = nn.functional.linear(total, weight)
    total.float().square().sum().backward()
    assert x.grad is not None
    return [total.detach(), x.grad, *(grad for run in present for grad in run.gradients())]


def inputs(length: int) -> tuple[Tensor, list[Tensor]]:
    """Return the input of a pass, and the frozen weights of both layers."""
    x = torch.randn(length, LAYERS[0].in_features).to(DTYPE)
    return x, [torch.randn(each.out_features, each.in_features).to(DTYPE) / 3 for each in LAYERS]


@given(SIZES, st.booleans(), st.sampled_from([(2,), (2, 1), (2, 2, 1)]))
@settings(deadline=None)
def test_adapters_in_company_compute_what_each_does_by_itself(
    sizes: Sizes, is_flat: bool, count: Sequence[int]
) -> None:
    together, length = runs(sizes, is_flat=is_flat, count=count)
    x, weights = inputs(length)

    total, dx, *gradients = computed(together, x, weights)

    of_each = iter(gradients)
    for run in together:
        own_total, own_dx, *own_gradients = computed([run], x, weights)
        ours = [total[run.rows], dx[run.rows], *(next(of_each) for _ in own_gradients)]
        for value, own in zip(
            ours, [own_total[run.rows], own_dx[run.rows], *own_gradients], strict=True
        ):
            error, size = (value - own).float().norm(), own.float().norm()
            # What cancels in half precision is off by more than its own size.
            assert error <= 0.03 * size + 0.1


@given(SIZES, st.data(), st.booleans())
@settings(deadline=None)
def test_a_non_finite_value_reaches_the_adapter_of_its_position_only(
    sizes: Sizes, data: st.DataObject, is_flat: bool
) -> None:
    together, length = runs(sizes, is_flat=is_flat, count=(2,))
    x, weights = inputs(length)
    broken = data.draw(st.sampled_from(together))
    x[broken.rows] = torch.nan

    total, dx, *gradients = computed(together, x, weights)

    is_empty = broken.rows.start == broken.rows.stop
    per_run = len(gradients) // len(together)
    for index, run in enumerate(together):
        own = [total[run.rows], dx[run.rows], *gradients[index * per_run : (index + 1) * per_run]]
        assert all(bool(value.isfinite().all()) for value in own) == (run is not broken or is_empty)


@given(SIZES)
@settings(deadline=None)
def test_an_adapter_that_overflows_changes_no_other(sizes: Sizes) -> None:
    together, length = runs(sizes, is_flat=True, count=(2,))
    x, weights = inputs(length)
    healthy = computed(together, x, weights)[0]
    for tensor in together[0].weights.tensors.values():
        tensor.data.fill_(torch.inf)

    total = computed(together, x, weights)[0]

    others = torch.ones(length, dtype=torch.bool)
    others[together[0].rows] = False
    assert torch.equal(total[others], healthy[others])


def test_an_adapter_alone_has_the_same_bits_whether_or_not_it_is_one_vector() -> None:
    results = []
    for is_flat in (False, True):
        present, length = runs([(7, 4, 1)], is_flat=is_flat, count=(2,))
        results.append(computed(present, *inputs(length)))

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), min_size=2, max_size=5),
    st.integers(0, 9),
)
def test_a_stack_of_mixed_lengths_is_as_exact_as_each_adapter_alone(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    """The base's part nearly cancels the adapter's, so that an additional rounding is large."""
    torch.manual_seed(seed)
    ends = list(accumulate((length + base for length, base in sizes), initial=0))
    members = [slice(end, end + length) for end, (length, _) in zip(ends, sizes, strict=False)]
    low = torch.randn(ends[-1], 4).to(DTYPE)
    right = torch.randn(len(members), 4, 32).to(DTYPE)
    places = _Places.of(members, low.device)
    left = places.gathered(low)
    if places.is_padding_GL1 is not None:
        left = left.masked_fill(places.is_padding_GL1, 0.0)
    exact = torch.zeros(ends[-1], 32, dtype=torch.float64)
    for rows, own in zip(members, right, strict=True):
        exact[rows] = low[rows].double() @ own.double()
    base = (exact * -1.01).to(DTYPE)
    alone, together = base.clone(), base.clone()

    for rows, own in zip(members, right, strict=True):
        alone[rows].addmm_(low[rows], own)
    places.add_product(together, left, right)

    errors = [(each.double() - base.double() - exact).abs().max() for each in (together, alone)]
    assert errors[0] <= 1.01 * errors[1]
