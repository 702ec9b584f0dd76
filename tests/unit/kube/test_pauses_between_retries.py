"""Pauses between retries."""

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_kube.informer import pause_seconds


@given(st.integers(1, 10_000))
def test_a_pause_is_neither_zero_nor_longer_than_the_limit(failures: int) -> None:
    assert 0.2 < pause_seconds(failures) <= 30


def test_pauses_have_jitter_so_that_replicas_do_not_retry_together() -> None:
    assert len({pause_seconds(5) for _ in range(20)}) > 10


def test_pauses_grow_with_every_failure() -> None:
    assert pause_seconds(1) < pause_seconds(3) < pause_seconds(5)
