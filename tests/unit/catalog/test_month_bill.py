"""What a month costs: tokens and storage by owner, project and base model, times the prices."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage.stored_days import StoredBytes, StoredDays
from tinkercloud_api.catalog.usage.usage_ledger import UsageTotal
from tinkercloud_api.config.sections.price_settings import PriceSettings
from tinkercloud_api.runs.month_bill import bill
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

GIB = 1 << 30
PATH = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "x")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    opened = open_database(database_url)
    await migrate(opened)
    yield opened
    await opened.dispose()


def manifest(*, size: int, day: int) -> CheckpointManifest:
    return CheckpointManifest.model_validate(
        {
            "tinker_path": str(PATH),
            "owner": "ann",
            "base_model": "tiny",
            "lora": None,
            "step": 1,
            "created_at": datetime(2026, 1, day, tzinfo=UTC),
            "files": {"a": {"size_bytes": size, "sha256": "x"}},
        }
    )


def used(owner: str, base_model: str, **tokens: int) -> UsageTotal:
    names = ("trained", "forward", "prefill", "cached", "sampled")
    amounts: dict[str, int | float] = {f"{n}_tokens": tokens.get(n, 0) for n in names}
    amounts["engine_seconds"] = 0.5
    return UsageTotal(owner, base_model, None, "vision", 0, 1, amounts)


def test_each_kind_of_use_has_its_price_and_a_model_without_one_has_no_cost() -> None:
    prices = PriceSettings.model_validate(
        {"models": {"a": {"train": 2, "prefill": 0.1, "sample": "0.3", "storage": 0.05}}}
    )
    tokens = [
        used("ann", "a", trained=1_500_000, forward=500_000, prefill=3_000_000, sampled=1_000_000),
        used("ann", "b", trained=1_000_000),
    ]
    stored = [StoredBytes("ann", "vision", "a", 15 * 10 * GIB)]

    first, second = bill(tokens, stored, 30, prices)

    assert first.train_tokens == 2_000_000
    assert first.storage_gib_months == 5.0
    assert first.cost == pytest.approx(2 * 2 + 3 * 0.1 + 0.3 + 5 * 0.05)
    assert (second.base_model, second.cost) == ("b", None)


def test_the_prices_of_all_other_models_apply_to_those_without_their_own() -> None:
    prices = PriceSettings.model_validate({"models": {"*": {"train": 1}, "a": {"train": 3}}})

    costs = [
        row.cost for row in bill([used("ann", m, trained=10**6) for m in "ab"], [], 30, prices)
    ]

    assert costs == [3.0, 1.0]


def test_the_cost_of_few_tokens_is_not_rounded_away() -> None:
    prices = PriceSettings.model_validate({"models": {"*": {"train": "0.4"}}})

    few = bill([used(name, "a", trained=30) for name in ("ann", "bob")], [], 30, prices)

    assert [row.cost for row in few] == [0.000012, 0.000012]


def test_a_bill_by_key_has_the_same_total_with_storage_in_a_row_without_a_key() -> None:
    prices = PriceSettings.model_validate({"models": {"*": {"train": 2, "storage": 1}}})
    amounts = used("ann", "a", trained=10**6).amounts
    by_key = [
        UsageTotal("ann", "a", None, None, 0, 1, amounts, key_id=number, key_name=name)
        for number, name in ((7, "ci"), (9, "laptop"), (None, None))
    ]
    stored = [StoredBytes("ann", project, "a", 30 * GIB) for project in ("vision", None)]

    rows = bill(by_key, stored, 30, prices, by="key")

    assert [(row.key_id, row.key_name, row.project_id, row.cost) for row in rows] == [
        (None, None, None, 4.0),
        (7, "ci", None, 2.0),
        (9, "laptop", None, 2.0),
    ]


def test_the_costs_of_days_add_up_to_that_of_the_month() -> None:
    prices = PriceSettings.model_validate({"models": {"a": {"train": 2, "storage": 0.3}}})
    first = replace(used("ann", "a", trained=10**6), project_id=None, first_hour=24 * 100)
    second = replace(used("ann", "a", trained=10**6), project_id=None, first_hour=24 * 101)
    stored = [StoredBytes("ann", None, "a", 15 * GIB, day=day) for day in (101, 102)]

    days = bill([first, second], stored, 30, prices, by="day")
    (month,) = bill([first, second], [StoredBytes("ann", None, "a", 30 * GIB)], 30, prices)

    assert [row.day for row in days] == [date(1970, 4, each) for each in (13, 12, 11)]
    assert [row.cost for row in days] == pytest.approx([0.15, 2.15, 2.0])
    assert month.cost == pytest.approx(sum(row.cost or 0.0 for row in days))
    assert (month.day, month.engine_seconds) == (None, 1.0)


async def test_storage_is_measured_once_a_day_and_deleted_checkpoints_stay_billed(
    engine: AsyncEngine,
) -> None:
    catalog = Catalog(engine)
    await catalog.record_pending_checkpoint(PATH, "ann")
    await catalog.index_checkpoint(manifest(size=3 * GIB, day=1))
    await StoredDays(engine).measure(100)
    await catalog.reindex_checkpoint(manifest(size=5 * GIB, day=2))
    for replica in (StoredDays(engine), StoredDays(engine)):
        await replica.measure(100)
        await replica.measure(101)
    await catalog.forget_checkpoint(PATH)
    days = StoredDays(engine)
    await days.measure(102)

    assert await days.stored("ann", 100, 103) == [StoredBytes("ann", None, "tiny", 8 * GIB)]
    assert await days.stored(None, 101, 102) == [StoredBytes("ann", None, "tiny", 5 * GIB)]
    assert await days.stored("bob", 100, 103) == []
    assert await days.stored("ann", 100, 103, by_day=True) == [
        StoredBytes("ann", None, "tiny", size * GIB, day=day) for day, size in ((100, 3), (101, 5))
    ]
