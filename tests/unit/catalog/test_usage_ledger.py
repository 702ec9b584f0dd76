"""The ledger of usage: no report counts twice, and the last one of a head is enough."""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import accumulate
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.usage.usage_ledger import Grouping, UsageLedger, UsageQuery, UsageTotal
from tinkercloud_api.config import api_metrics
from tinkercloud_protocol.heads.reports.usage_reports import UsageEntry, UsageReport
from tinkercloud_testing.serving.metrics import metric_value

ALL = Page(0, 1000)
MODELS = ("", "s:train:0", "s:train:1")
Counts = Mapping[tuple[int, str], tuple[int, float]]
"""Tokens and seconds by hour and model."""


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture
def ledger(runner: asyncio.Runner, database_url: str) -> Iterator[UsageLedger]:
    engine = open_database(database_url)
    runner.run(migrate(engine))
    yield UsageLedger(engine)
    runner.run(engine.dispose())


def a_report(generation: str, counts: Counts, owner: str = "me") -> UsageReport:
    entries = [
        UsageEntry(
            hour=hour,
            owner=owner,
            session_id="s",
            model_id=model,
            trained_tokens=tokens,
            engine_seconds=seconds,
        )
        for (hour, model), (tokens, seconds) in counts.items()
    ]
    return UsageReport(generation=generation, base_model="base", entries=entries)


def one(tokens: int, *, hour: int = 7, model: str = "s:train:0") -> Counts:
    return {(hour, model): (tokens, tokens / 4)}


async def totals(ledger: UsageLedger, by: Grouping, owner: str) -> list[UsageTotal]:
    return list(await ledger.totals(UsageQuery(by, owner), ALL))


def grow(counts: Counts, more: tuple[int, str, int]) -> Counts:
    hour, model, tokens = more
    known_tokens, known_seconds = counts.get((hour, model), (0, 0.0))
    return {**counts, (hour, model): (known_tokens + tokens, known_seconds + tokens / 4)}


def history(work: list[tuple[int, str, int]]) -> list[Counts]:
    """Return what a head has counted after each request."""
    nothing: Counts = {}
    return list(accumulate(work, grow, initial=nothing))[1:]


HISTORIES = st.lists(
    st.tuples(st.integers(40, 60), st.sampled_from(MODELS), st.integers(1, 9)),
    min_size=1,
    max_size=8,
).map(history)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(heads=st.lists(HISTORIES, min_size=1, max_size=3), data=st.data())
def test_reports_in_any_order_repeated_or_lost_add_up_to_the_counts_of_the_heads(
    runner: asyncio.Runner, ledger: UsageLedger, heads: list[list[Counts]], data: st.DataObject
) -> None:
    owner, generations = uuid4().hex, [uuid4().hex for _ in heads]
    sent = [(head, index) for head, counts in enumerate(heads) for index in range(len(counts))]
    arriving = data.draw(st.lists(st.sampled_from(sent), max_size=12))
    for head, reports in enumerate(heads):
        last = (head, len(reports) - 1)
        arriving.insert(data.draw(st.integers(0, len(arriving))), last)

    arrived: list[dict[tuple[int, str], tuple[int, float]]] = [{} for _ in heads]
    for head, index in arriving:
        counts = heads[head][index]
        runner.run(ledger.record(a_report(generations[head], counts, owner)))
        arrived[head] |= {key: max(arrived[head].get(key, (0, 0.0)), counts[key]) for key in counts}
        recorded = runner.run(totals(ledger, "model", owner))
        assert tokens_of(recorded) == sum(n for each in arrived for n, _ in each.values())

    final = [key_and_counts for reports in heads for key_and_counts in reports[-1].items()]
    for by in ("hour", "day", "model"):
        rows = runner.run(totals(ledger, by, owner))
        assert tokens_of(rows) == sum(tokens for _, (tokens, _) in final)
        assert sum(row.amounts["engine_seconds"] for row in rows) == tokens_of(rows) / 4
    rows = runner.run(totals(ledger, "model", owner))
    by_model = {row.model_id: row.amounts["trained_tokens"] for row in rows}
    assert by_model == {
        model: sum(tokens for (_, name), (tokens, _) in final if name == model)
        for model in {name for (_, name), _ in final}
    }


def tokens_of(rows: list[UsageTotal]) -> float:
    return sum(row.amounts["trained_tokens"] for row in rows)


def test_replicas_that_record_the_same_report_at_the_same_time_count_it_once(
    runner: asyncio.Runner, ledger: UsageLedger, database_url: str
) -> None:
    owner = uuid4().hex
    engine = open_database(database_url)
    other = UsageLedger(engine)
    reports = [a_report("g", one(count, hour=hour), owner) for count in (3, 5) for hour in (8, 7)]

    async def record() -> None:
        await asyncio.gather(*(each.record(r) for each in (ledger, other) for r in reports))

    runner.run(record())

    (row,) = runner.run(totals(ledger, "model", owner))
    assert row.amounts["trained_tokens"] == 10
    assert metric_value(api_metrics.USAGE_TOKENS.labels(owner, "trained")) == 10
    runner.run(engine.dispose())


def test_hours_days_and_models_are_summed_up_and_the_latest_come_first(
    runner: asyncio.Runner, ledger: UsageLedger
) -> None:
    for generation, hour, model, tokens in (
        ("g1", 23, "s:train:0", 1),
        ("g1", 24, "s:train:0", 2),
        ("g2", 24, "s:train:1", 4),
        ("g2", 47, "s:train:1", 8),
    ):
        runner.run(ledger.record(a_report(generation, one(tokens, hour=hour, model=model))))

    def rows(by: Grouping, **bounds: int) -> list[tuple[object, ...]]:
        found = runner.run(ledger.totals(UsageQuery(by, "me", **bounds), ALL))
        return [(r.model_id, r.first_hour, r.end_hour, r.amounts["trained_tokens"]) for r in found]

    assert rows("hour") == [(None, 47, 48, 8), (None, 24, 25, 6), (None, 23, 24, 1)]
    assert rows("day") == [(None, 24, 48, 14), (None, 0, 24, 1)]
    assert rows("model") == [("s:train:1", 24, 48, 12), ("s:train:0", 23, 25, 3)]
    assert rows("hour", since=24, until=47) == [(None, 24, 25, 6)]


def test_usage_of_one_owner_is_not_that_of_another(
    runner: asyncio.Runner, ledger: UsageLedger
) -> None:
    runner.run(ledger.record(a_report("g", one(1), owner="me")))
    runner.run(ledger.record(a_report("g", one(2), owner="you")))

    everybody = runner.run(ledger.totals(UsageQuery("model", None), ALL))

    assert tokens_of(runner.run(totals(ledger, "model", "me"))) == 1
    assert {row.owner: row.amounts["trained_tokens"] for row in everybody} == {"me": 1, "you": 2}
