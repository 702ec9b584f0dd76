"""Models that shared a pass are waited for, as long as their next requests come in time."""

from dataclasses import dataclass, field

import pytest

from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.followers import Followers

IN_TIME = 0.02
A, B = Share("ada", "a", 1), Share("bob", "b", 1)


@dataclass
class Waiting:
    """Followers with a clock that a test sets."""

    seconds: float = 0.0
    followers: Followers = field(init=False)

    def __post_init__(self) -> None:
        self.followers = Followers(lambda: self.seconds)

    def share_a_pass(self, *followed: Share) -> None:
        self.followers.note_pass([A, B], followed, IN_TIME)

    def send(self, share: Share, after: float) -> None:
        self.seconds += after
        self.followers.note_sent(share.owner, share.model)

    @property
    def is_over(self) -> bool:
        assert self.followers.have_come == (self.followers.seconds_left() == 0)
        return self.followers.have_come


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_a_wait_ends_when_all_requests_have_come(waiting: Waiting) -> None:
    waiting.share_a_pass(A, B)

    waiting.send(A, after=0.001)
    assert not waiting.is_over
    waiting.send(B, after=0.001)
    assert waiting.is_over


def test_a_wait_ends_when_its_time_is_over_and_does_not_return(waiting: Waiting) -> None:
    waiting.share_a_pass(A)
    waiting.seconds = IN_TIME

    assert waiting.followers.seconds_left() == 0
    assert waiting.is_over
    waiting.seconds = 0
    assert waiting.is_over


def test_a_model_is_not_waited_for_if_nothing_is_known_to_follow(waiting: Waiting) -> None:
    waiting.share_a_pass(B)

    waiting.send(B, after=0)

    assert waiting.is_over


def test_a_model_that_came_late_is_waited_for_again_once_it_has_come_in_time(
    waiting: Waiting,
) -> None:
    waiting.share_a_pass(A)
    waiting.send(A, after=1.0)

    waiting.share_a_pass(A)
    assert waiting.is_over
    waiting.send(A, after=1.0)
    waiting.share_a_pass(A)
    assert waiting.is_over
    waiting.send(A, after=0.01)
    # Only the first request after a pass says whether the model is prompt.
    waiting.send(A, after=1.0)
    waiting.share_a_pass(A)
    assert not waiting.is_over


def test_a_late_model_does_not_keep_the_engine_from_waiting_for_others(waiting: Waiting) -> None:
    waiting.share_a_pass(A, B)
    waiting.send(B, after=0)
    waiting.send(A, after=1.0)

    waiting.share_a_pass(A, B)

    assert not waiting.is_over
    waiting.send(B, after=0)
    assert waiting.is_over


def test_a_model_without_a_shared_pass_for_a_while_is_forgotten(waiting: Waiting) -> None:
    waiting.share_a_pass(A)
    waiting.send(A, after=1.0)
    waiting.seconds += 10

    waiting.share_a_pass(A)

    assert not waiting.is_over


def test_nobody_is_waited_for_once_something_else_runs(waiting: Waiting) -> None:
    waiting.share_a_pass(A, B)

    waiting.followers.stop()

    assert waiting.is_over
