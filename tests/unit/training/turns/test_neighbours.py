"""Pieces of long jobs are small while owners with small requests use the engine."""

import pytest

from tinkercloud_worker.engine.turns.neighbours import Neighbours


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def neighbours(clock: Clock) -> Neighbours:
    return Neighbours(clock)


def test_an_owner_alone_has_no_limit(neighbours: Neighbours) -> None:
    neighbours.note("ada", 64_000)

    assert neighbours.most_tokens("ada") is None


def test_a_piece_is_not_larger_than_the_largest_job_of_the_smallest_other_owner(
    neighbours: Neighbours,
) -> None:
    neighbours.note("ada", 64_000)
    for tokens in (300, 900, 8):
        neighbours.note("bob", tokens)
    neighbours.note("eve", 5_000)

    assert neighbours.most_tokens("ada") == 900
    assert neighbours.most_tokens("bob") == 5_000


def test_an_owner_who_sends_nothing_any_more_limits_nobody(
    neighbours: Neighbours, clock: Clock
) -> None:
    neighbours.note("bob", 5)
    clock.seconds = 11

    assert neighbours.most_tokens("ada") is None


def test_an_owner_whose_jobs_have_become_smaller_counts_as_small_after_a_while(
    neighbours: Neighbours, clock: Clock
) -> None:
    for seconds, tokens in ((0, 4_000), (30, 500), (61, 500), (62, 8)):
        clock.seconds = seconds
        neighbours.note("bob", tokens)

    assert neighbours.most_tokens("ada") == 500


def test_an_owner_is_prompt_until_it_sends_late_and_again_once_it_sends_in_time(
    neighbours: Neighbours, clock: Clock
) -> None:
    neighbours.note("bob", 500)
    neighbours.note("ada", 500)
    prompt = [neighbours.is_prompt("ada")]
    for pause in (3, 0.5, 3, 1):
        neighbours.note_end("ada")
        clock.seconds += pause
        neighbours.note("ada", 500)
        neighbours.note_sent("ada", in_time=1)
        # What follows is not behind a batch.
        clock.seconds += 2
        neighbours.note_sent("ada", in_time=1)
        prompt.append(neighbours.is_prompt("ada"))
        neighbours.note("bob", 500)

    assert prompt == [True, False, True, False, True]


def test_nobody_is_waited_for_while_no_other_owner_uses_the_engine(
    neighbours: Neighbours, clock: Clock
) -> None:
    neighbours.note("ada", 500)
    neighbours.note("bob", 500)
    clock.seconds = 11.0
    neighbours.note("ada", 500)

    assert not neighbours.is_prompt("ada")
    assert not neighbours.is_prompt("eve")
