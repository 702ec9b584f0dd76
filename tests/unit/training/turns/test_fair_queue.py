"""Whose turn it is: shares, order, and no idle turns."""

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_worker.engine.turns.fair_queue import Accounts, FairQueue, Share

OWNERS, MODELS = st.sampled_from("abc"), st.sampled_from("xyz")
SHARES = st.builds(Share, OWNERS, MODELS, st.integers(0, 50), st.booleans())
WEIGHTS = st.fixed_dictionaries({name: st.integers(1, 4) for name in "abc"})


def put_all(queue: FairQueue[int], shares: Sequence[Share]) -> None:
    for number, share in enumerate(shares):
        queue.put(share, number)


def take(queue: FairQueue[int]) -> tuple[Share, int]:
    share, number = queue.next()
    queue.charge(share, share.tokens)
    return share, number


@given(
    st.lists(
        st.builds(Share, OWNERS, MODELS, st.integers(1, 50), st.booleans()),
        min_size=40,
        max_size=80,
    ),
    WEIGHTS,
)
def test_while_owners_wait_their_shares_differ_by_at_most_one_turn_of_each(
    shares: list[Share], weights: dict[str, int]
) -> None:
    queue = FairQueue[int](weights)
    put_all(queue, shares)
    waiting = defaultdict[str, int](int)
    for share in shares:
        waiting[share.owner] += 1
    used = dict.fromkeys(waiting, 0.0)
    # An item, and one that continues it.
    largest = 2 * max(share.tokens for share in shares)

    while all(waiting.values()):
        share, _ = take(queue)
        waiting[share.owner] -= 1
        used[share.owner] += share.tokens / weights[share.owner]
        for one in used:
            for other in used:
                bound = largest / weights[one] + largest / weights[other]
                assert used[one] - used[other] <= bound + 1e-6


@given(st.lists(SHARES | st.none(), max_size=60))
def test_nothing_waits_while_nothing_runs_and_nothing_is_lost(
    events: list[Share | None],
) -> None:
    queue = FairQueue[int]()
    waiting = set[int]()

    for number, share in enumerate(events):
        if share is not None:
            queue.put(share, number)
            waiting.add(number)
        elif waiting:
            waiting.remove(take(queue)[1])
        assert len(queue) == len(waiting)
        assert bool(queue) == bool(waiting)
    for _ in range(len(waiting)):
        waiting.remove(take(queue)[1])
    assert not queue
    assert not waiting


@given(st.lists(SHARES | st.none(), max_size=60), st.integers(0, 1))
def test_the_items_of_a_model_keep_their_order(events: list[Share | None], joining: int) -> None:
    queue = FairQueue[int]()
    taken = defaultdict[tuple[str, str], list[int]](list)

    def take_all() -> None:
        share, number = queue.next()
        taken[share.owner, share.model].append(number)

        def join(other: Share, number: int) -> bool:
            if joining and number % 2:
                taken[other.owner, other.model].append(number)
                return True
            return False

        queue.take_joining(share, join)

    for number, share in enumerate(events):
        if share is not None:
            queue.put(share, number)
        elif queue:
            take_all()
    while queue:
        take_all()
    assert all(numbers == sorted(numbers) for numbers in taken.values())


@given(st.lists(st.integers(0, 50), max_size=30))
def test_a_queue_of_one_model_is_first_in_first_out(tokens: list[int]) -> None:
    queue = FairQueue[int]()
    put_all(queue, [Share("a", "x", each) for each in tokens])

    assert [take(queue)[1] for _ in tokens] == list(range(len(tokens)))


@given(st.integers(1, 6), st.integers(1, 50))
def test_jobs_of_equal_size_of_one_owner_run_in_order_of_arrival(count: int, tokens: int) -> None:
    queue = FairQueue[int]()
    put_all(queue, [Share("a", f"model-{number}", tokens) for number in range(count)])

    assert [take(queue)[1] for _ in range(count)] == list(range(count))


def test_an_owner_with_many_models_gets_no_more_than_an_owner_with_one() -> None:
    queue = FairQueue[int]()
    put_all(queue, [Share("many", f"model-{number % 10}", 4) for number in range(100)])
    put_all(queue, [Share("one", "m", 4) for _ in range(100)])

    owners = [take(queue)[0].owner for _ in range(100)]

    assert owners.count("one") == 50


def test_a_step_runs_before_others_even_if_it_arrives_after_their_turn_has_started() -> None:
    queue = FairQueue[str]()
    for owner in ("small", "large"):
        queue.put(Share(owner, "m", 10), f"{owner} batch")
        queue.put(Share(owner, "m", 10), f"{owner} batch")
    order = [queue.next()]
    queue.charge(order[0][0], 1000)
    order.append(queue.next())
    queue.put_back(Share("small", "m", 8, continues=True), "small step")
    order += [queue.next() for _ in range(3)]

    assert [item for _, item in order] == [
        "small batch",
        "large batch",
        "small step",
        "large batch",
        "small batch",
    ]


def test_only_one_step_runs_behind_a_batch() -> None:
    queue = FairQueue[str]()
    queue.put(Share("steps", "m", 10), "batch")
    for _ in range(3):
        queue.put(Share("steps", "m", 10, continues=True), "step")
    for _ in range(2):
        queue.put(Share("other", "m", 10), "other")

    order = []
    while queue:
        share, item = queue.next()
        queue.charge(share, share.tokens)
        order.append(item)

    assert order == ["batch", "step", "other", "other", "step", "step"]


def test_a_pause_gives_no_credit() -> None:
    queue = FairQueue[int]()
    for _ in range(100):
        queue.put(Share("busy", "m", 10), 0)
        take(queue)

    put_all(queue, [Share(owner, "m", 10) for owner in ("back", "busy") * 10])
    owners = [take(queue)[0].owner for _ in range(10)]

    assert owners.count("back") in {5, 6}


def test_an_owner_with_one_job_at_a_time_still_owes_what_it_has_used() -> None:
    queue = FairQueue[int]()
    order = []
    queue.put(Share("large", "m", 100), 0)
    queue.put(Share("small", "m", 10), 0)
    for _ in range(12):
        share, _ = take(queue)
        order.append(share.owner)
        queue.put(share, 0)

    assert order == ["large", *["small"] * 10, "large"]


def test_what_is_put_back_is_next_of_its_model() -> None:
    queue = FairQueue[int]()
    put_all(queue, [Share("a", "x", 1), Share("a", "x", 1)])
    share, number = take(queue)

    queue.put_back(share, number)

    assert take(queue)[1] == number


@given(st.lists(SHARES, min_size=1, max_size=30), st.integers(0, 29))
def test_it_knows_what_runs_before_an_item_whenever_it_is_asked(
    shares: list[Share], taken: int
) -> None:
    queue = FairQueue[int]({"b": 3})
    put_all(queue, shares)
    for _ in range(min(taken, len(shares) - 1)):
        queue.ahead_of("a", "x")
        take(queue)
    ahead = queue.ahead_of("a", "x")
    items = tokens = 0
    while queue:
        share, _ = take(queue)
        if (share.owner, share.model) == ("a", "x"):
            assert ahead is not None
            assert (ahead.items, ahead.tokens) == (items, tokens)
            return
        items, tokens = items + 1, tokens + share.tokens
    assert ahead is None


def test_accounts_of_owners_who_left_are_closed() -> None:
    queue = FairQueue[int]()
    for number in range(1000):
        queue.put(Share(f"owner-{number}", "m", 10), 0)
        take(queue)
        queue.put(Share("stays", "m", 10), 0)
        take(queue)

    assert len(queue._lines) < 10
    assert len(queue._owners._used) < 10


def test_a_line_that_is_skipped_does_not_hold_up_the_others() -> None:
    accounts = Accounts()

    order = list(accounts.in_turn({"a": iter([1, 2]), "b": iter([3])}))

    assert order == [("a", 1), ("a", 2), ("b", 3)]
