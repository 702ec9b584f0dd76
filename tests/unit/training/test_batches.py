"""Micro-batches: every example once, padding small, the grouping a function of the lengths."""

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_worker.engine.batch import micro_batches

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(lengths, st.integers(1, 500))
def test_every_example_is_in_one_group_within_the_budget(sizes: list[int], budget: int) -> None:
    groups = micro_batches(sizes, budget)

    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        padded = len(group) * max(sizes[index] for index in group)
        assert padded <= budget or len(group) == 1


@given(lengths, st.integers(100, 500))
def test_groups_are_of_like_lengths(sizes: list[int], budget: int) -> None:
    flat = [sizes[index] for group in micro_batches(sizes, budget) for index in group]

    assert flat == sorted(sizes, reverse=True)


@given(lengths, st.integers(1, 500), st.randoms())
def test_the_grouping_of_lengths_does_not_depend_on_their_order(sizes, budget, random) -> None:
    shuffled = list(sizes)
    random.shuffle(shuffled)

    def shape(order: list[int]) -> list[list[int]]:
        return [[order[index] for index in group] for group in micro_batches(order, budget)]

    assert shape(sizes) == shape(shuffled)
