"""When heads are asked again what their memory holds."""

from tinkercloud_operator.decide.pool.head_answers import ASK_AGAIN_SECONDS, Asked


def pause_of(asked: Asked) -> int:
    """Return after how many whole seconds a head is asked again."""
    return next(second for second in range(10_000) if asked.is_due(asked.at + second))


def test_a_head_that_was_never_asked_is_asked_at_once() -> None:
    assert Asked().is_due(0.0)


def test_a_silent_head_is_asked_less_and_less_often_but_again_and_again() -> None:
    asked = Asked()
    pauses: list[int] = []
    for _ in range(2000):
        asked = asked.failed(100.0)
        pauses.append(pause_of(asked) if len(pauses) < 20 else pauses[-1])

    assert pauses[:5] == [30, 60, 120, 240, 240]
    assert asked.is_silent
    assert asked.is_due(100.0 + pauses[-1])


def test_a_head_that_answers_again_is_asked_as_often_as_before() -> None:
    asked = Asked().failed(0.0).failed(60.0).answered(90.0)

    assert pause_of(asked) == ASK_AGAIN_SECONDS
    assert not asked.is_silent
