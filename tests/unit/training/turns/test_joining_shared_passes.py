"""Which queued passes join one at the ranks, and how often that is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_worker.actors import shared_passes
from tinkercloud_worker.actors.shared_passes import RankedPasses, divided, most_tokens
from tinkercloud_worker.engine.batch import Batch, ModelLimits, padded_lengths, prepare
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import TrainingPass

LIMITS = ModelLimits(512, 4096)


@dataclass
class Ranks:
    """Ranks that compute nothing; each is a replica."""

    replicas: int
    most: int
    multiple: int = 1

    def memberships(self) -> Sequence[Membership]:
        one = Membership(LIMITS, 0, answers=True, pad_to_multiple_of=self.multiple)
        return [
            replace(one, replica=replica, max_shared_tokens=self.most)
            for replica in range(self.replicas)
        ]

    def may_share(self, model_id: str) -> bool:
        return model_id != "whole"

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def a_pass(model_id: str, lengths: Sequence[int]) -> TrainingPass:
    return TrainingPass(model_id, prepare(a_request(random_data(lengths)), LIMITS))


def fits(ranks: Ranks, batches: Sequence[Batch]) -> bool:
    memberships = ranks.memberships()
    return most_tokens(batches, divided(batches, memberships), ranks.multiple) <= ranks.most


@given(
    requests=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=2, max_size=6),
    ranks=st.builds(Ranks, st.integers(1, 4), st.integers(4, 40), st.sampled_from([1, 4])),
)
def test_passes_join_exactly_if_each_replica_has_room_for_its_part(
    requests: Sequence[Sequence[int]], ranks: Ranks
) -> None:
    passes, [first, *others] = (
        RankedPasses(ranks),
        [a_pass(str(number), lengths) for number, lengths in enumerate(requests)],
    )
    joined = [first]
    for item in others:
        expected = fits(ranks, [each.batch for each in (*joined, item)])
        assert passes.can_batch(joined, item) == expected
        assert RankedPasses(ranks).can_batch(joined, item) == expected
        if expected:
            joined = [*joined, item]


def test_each_of_a_hundred_small_passes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Sequence[int]] = []
    measure = padded_lengths

    def record(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
        measured.append(lengths)
        return measure(lengths, multiple)

    monkeypatch.setattr(shared_passes, "padded_lengths", record)
    passes = RankedPasses(Ranks(8, 1000))
    [first, *others] = [a_pass(str(number), [5, 9]) for number in range(100)]

    joined = [first]
    for item in others:
        assert passes.can_batch(joined, item)
        joined = [*joined, item]

    assert len(measured) == 100
