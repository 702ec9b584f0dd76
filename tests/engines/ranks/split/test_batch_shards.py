"""Splitting a batch over replicas, and placing ranks on nodes."""

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_worker.actors.batch_shards import assign_examples, merge_outputs
from tinkercloud_worker.actors.rank_group import grouped_by_node
from tinkercloud_worker.engine.trainer import LossOutput

lengths = st.lists(st.integers(1, 100), max_size=60)


@given(lengths, st.integers(1, 8))
def test_every_example_goes_to_one_replica_in_the_batchs_order(
    sizes: list[int], replicas: int
) -> None:
    shares = assign_examples(sizes, replicas)

    assert len(shares) == replicas
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)


@given(lengths, st.integers(1, 8))
def test_no_replica_has_more_than_the_others_by_more_than_one_example(
    sizes: list[int], replicas: int
) -> None:
    loads = [sum(sizes[index] for index in share) for share in assign_examples(sizes, replicas)]

    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_results_come_back_in_the_batchs_order_and_metrics_are_summed() -> None:
    shares = [[0, 3], [1], [2], []]
    outputs = [
        LossOutput(
            [np.full(2, float(index), np.float32) for index in share],
            {"loss:sum": 1.5},
            np.array([[1, 2]]) if share else None,
        )
        for share in shares
    ]

    whole = merge_outputs(shares, outputs)

    assert [float(logprobs[0]) for logprobs in whole.logprobs] == [0.0, 1.0, 2.0, 3.0]
    assert whole.metrics == {"loss:sum": 6.0}
    with_examples = sum(1 for share in shares if share)
    assert whole.expert_tokens is not None
    assert whole.expert_tokens.tolist() == [[with_examples, 2 * with_examples]]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=16))
def test_ranks_of_one_node_have_numbers_that_follow_each_other(nodes: list[str]) -> None:
    places = grouped_by_node(dict(enumerate(nodes)))

    of_ranks = [nodes[place] for place in places]
    assert sorted(places) == list(range(len(nodes)))
    assert len(list(groupby(of_ranks))) == len(set(nodes))
