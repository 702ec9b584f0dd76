"""Tokens per minute: requests of any size run, in order, and on average no more than allowed."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_worker.head.wire.token_limits import TokenBucket, TokenLimits


def limits(tokens: int | None, owner: str = "ada") -> OwnerLimits:
    return OwnerLimits(owner=owner, tenant="research", tokens_per_minute=tokens)


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 30)), min_size=1, max_size=40),
)
def test_no_more_than_the_limit_is_used_on_average(
    per_minute: int, requests: list[tuple[int, float]]
) -> None:
    bucket, now, used, last = TokenBucket(per_minute, float(per_minute), 0.0), 0.0, 0, 0
    for tokens, pause in requests:
        now += pause
        now += bucket.seconds_to_wait(now)
        assert bucket.seconds_to_wait(now) < 1e-6
        bucket.take(tokens, now)
        used, last = used + tokens, tokens
    # The bucket was full at first, and the last request may leave a debt.
    assert used - last <= per_minute + now * per_minute / 60 + 1e-3


def test_a_request_larger_than_the_limit_runs_and_the_next_waits_for_its_debt() -> None:
    bucket = TokenBucket(600, 600.0, 0.0)
    bucket.take(1000, 0.0)

    assert round(bucket.seconds_to_wait(0.0)) == 40
    assert bucket.seconds_to_wait(41.0) == 0.0


async def test_the_reason_names_the_tenant_and_the_seconds_and_spares_other_owners() -> None:
    clock = Clock()
    found = TokenLimits(clock)
    found.set(limits(600))
    found.spend("ada", 700)

    assert found.why_waiting("ada") == (
        "owner 'ada' has used the tokens of this minute (limits.tokensPerMinute of tenant"
        " 'research' is 600); the next request starts in 10 s"
    )
    assert found.why_waiting("grace") is None
    clock.now += 11
    assert found.has_room("ada")


async def test_samples_start_in_the_order_in_which_they_asked_when_the_limit_is_raised() -> None:
    found = TokenLimits(Clock())
    started: list[str] = []
    woken: list[str] = []
    found.listen(woken.append)
    found.set(limits(60))
    found.spend("ada", 6000)

    async def sample(name: str) -> None:
        await found.turn("ada", 1)
        started.append(name)

    waiting = [asyncio.create_task(sample(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert started == []

    found.set(limits(None))
    await asyncio.gather(*waiting)

    assert started == ["a", "b", "c"]
    assert woken == ["ada"]


async def test_a_live_change_of_the_limit_keeps_what_was_used() -> None:
    clock = Clock()
    found = TokenLimits(clock)
    found.set(limits(600))
    found.spend("ada", 900)
    assert not found.has_room("ada")

    found.set(limits(60_000))
    clock.now += 0.5

    assert found.has_room("ada")


async def test_a_sample_knows_how_long_it_had_to_wait() -> None:
    clock = Clock()
    found = TokenLimits(clock)
    found.set(limits(60))
    assert await found.turn("ada", 6000) == 0
    assert await found.turn("grace", 6000) == 0

    waiting = [asyncio.create_task(found.turn("ada", 1)) for _ in range(2)]
    await asyncio.sleep(0)
    clock.now += 5
    found.set(limits(None))

    assert await asyncio.gather(*waiting) == [5, 5]


async def test_tokens_that_a_sample_did_not_need_are_returned() -> None:
    found = TokenLimits(Clock())
    found.set(limits(600))
    await found.turn("ada", 5000)
    assert not found.has_room("ada")

    found.spend("ada", 100 - 5000)

    assert found.has_room("ada")
