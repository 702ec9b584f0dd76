"""Requests run once each, by number, in any order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded
from tinkercloud_worker.head.order.sequencer import MAX_AHEAD, Sequencer


def run_all(sequencer: Sequencer) -> list[int]:
    """Run all requests that can run now."""
    ran = []
    while (seq_id := sequencer.take()) is not None:
        ran.append(seq_id)
        sequencer.finish()
    return ran


def content(seq_id: int) -> bytes:
    return str(seq_id).encode()


@given(st.permutations(range(1, 12)), st.lists(st.integers(1, 11)))
def test_requests_in_any_order_with_duplicates_run_in_order_once(
    arrivals: list[int], repeated: list[int]
) -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    ran: list[int] = []

    answers = []
    for seq_id in [*arrivals, *repeated]:
        answers.append(sequencer.enqueue(seq_id, content(seq_id), size=1))
        ran += run_all(sequencer)

    assert answers == [True] * len(arrivals) + [False] * len(repeated)

    assert ran == list(range(1, 12))
    assert sequencer.num_pending == 0


@given(st.sets(st.integers(1, 30), min_size=1))
def test_nothing_runs_beyond_a_gap(arrived: set[int]) -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    for seq_id in arrived:
        sequencer.enqueue(seq_id, content(seq_id), size=1)

    ran = run_all(sequencer)

    assert ran == list(range(1, len(ran) + 1))
    assert len(ran) + 1 not in arrived
    assert sequencer.is_stuck is (len(ran) < len(arrived))


@given(st.sets(st.integers(2, 30), min_size=1))
def test_skipping_a_gap_drops_the_waiting_requests_and_continues_after_them(
    arrived: set[int],
) -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    for seq_id in arrived:
        sequencer.enqueue(seq_id, content(seq_id), size=1)

    dropped = sequencer.skip_gap()
    following = max(arrived) + 1
    sequencer.enqueue(following, content(following), size=1)

    assert dropped == sorted(arrived)
    assert run_all(sequencer) == [following]
    with pytest.raises(InvalidRequest, match=r"too low.*runs attach"):
        sequencer.enqueue(1, content(1), size=1)


def test_a_request_runs_only_after_the_previous_one_has_finished() -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    for seq_id in (1, 2):
        sequencer.enqueue(seq_id, content(seq_id), size=1)

    assert sequencer.take() == 1
    assert sequencer.take() is None
    sequencer.finish()
    assert sequencer.take() == 2


def test_a_number_with_different_content_is_rejected_until_its_result_is_forgotten() -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    sequencer.enqueue(1, b"one", size=1)
    run_all(sequencer)

    assert sequencer.enqueue(1, b"one", size=1) is False
    with pytest.raises(InvalidRequest, match=r"different content.*runs attach"):
        sequencer.enqueue(1, b"two", size=1)
    sequencer.forget(1)
    with pytest.raises(InvalidRequest, match=r"too low.*runs attach"):
        sequencer.enqueue(1, b"one", size=1)


def test_a_full_queue_rejects_all_requests_except_the_next_one() -> None:
    sequencer = Sequencer(max_queued_bytes=10)
    sequencer.enqueue(2, content(2), size=10)

    with pytest.raises(Overloaded):
        sequencer.enqueue(3, content(3), size=1)
    sequencer.enqueue(1, content(1), size=100)

    assert run_all(sequencer) == [1, 2]
    assert sequencer.enqueue(3, content(3), size=1) is True


def test_a_number_too_far_ahead_is_rejected() -> None:
    sequencer = Sequencer(max_queued_bytes=10)

    with pytest.raises(InvalidRequest, match="too high"):
        sequencer.enqueue(MAX_AHEAD + 2, b"x", size=1)


def test_repeated_requests_of_two_clients_run_without_the_numbers_between_them() -> None:
    sequencer, following = Sequencer(max_queued_bytes=1000), 5 + MAX_AHEAD + 1
    for seq_id in (1, 2, 4, following, following + 1):
        sequencer.admit(seq_id, content(seq_id), size=1)

    # Number 3 never arrived before the second client attached.
    assert sequencer.drop_before_hand_over() == [4]
    assert run_all(sequencer) == [1, 2]
    with pytest.raises(InvalidRequest, match="too low"):
        sequencer.enqueue(3, content(3), size=1)
    assert sequencer.enqueue(following + 2, content(following + 2), size=1)
    assert sequencer.cross_hand_over()
    assert run_all(sequencer) == [following, following + 1, following + 2]
    assert not sequencer.cross_hand_over()
    assert sequencer.queued_bytes == 0


def test_a_gap_within_the_requests_of_one_client_is_no_hand_over() -> None:
    sequencer = Sequencer(max_queued_bytes=1000)
    for seq_id in (1, 1 + MAX_AHEAD):
        sequencer.admit(seq_id, content(seq_id), size=1)

    assert sequencer.drop_before_hand_over() == []
    assert run_all(sequencer) == [1]
    assert not sequencer.cross_hand_over()
