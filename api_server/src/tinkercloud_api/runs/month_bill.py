"""What a month has cost: tokens and storage, multiplied by the prices of the settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from typing import Literal, NamedTuple

from tinkercloud_api.catalog.usage.stored_days import StoredBytes
from tinkercloud_api.catalog.usage.usage_ledger import UsageTotal
from tinkercloud_api.config.sections.price_settings import ModelPrices, PriceSettings
from tinkercloud_protocol.responses.listings import BilledUsage

_MILLION = Decimal(1_000_000)
_GIB = Decimal(1 << 30)
_HOURS_OF_DAY = 24
_EPOCH = date(1970, 1, 1)
COST_DECIMALS = 9
"""A token at 0.001 for a million still counts."""
MonthGrouping = Literal["project", "key", "day"]
"""What the rows of a month are of, in addition to owner and base model."""


class _Group(NamedTuple):
    """What a row sums up."""

    day: int | None
    """Days from 1970-01-01 in UTC; None means the whole month."""
    owner: str
    project_id: str
    """Empty for none, and for rows by day or key."""
    key_id: int
    """0 for none."""
    key_name: str
    base_model: str

    @property
    def place(self) -> tuple[object, ...]:
        """Its place in the list: the latest day first, then by name."""
        return (-(self.day or 0), *self[1:])


@dataclass(slots=True)
class _Amounts:
    """Tokens, and GiB-months."""

    train: int = 0
    prefill: int = 0
    cached: int = 0
    sample: int = 0
    engine_seconds: float = 0.0
    storage: Decimal = field(default_factory=Decimal)


def bill(
    used: Iterable[UsageTotal],
    stored: Iterable[StoredBytes],
    days: int,
    prices: PriceSettings,
    by: MonthGrouping = "project",
) -> Sequence[BilledUsage]:
    """Return what each owner has used, by project, key or day and base model, and what it costs.

    Args:
        used: the tokens of the month, by project, key or day.
        stored: the storage of the month, by day if rows are by day, otherwise by project.
        days: days of the month.
        prices: the prices.
        by: what the rows are of, in addition to owner and base model. Storage has no key.
    """
    found: dict[_Group, _Amounts] = {}
    for total in used:
        day = total.first_hour // _HOURS_OF_DAY if by == "day" else None
        key = total.key_id or 0, total.key_name or ""
        group = _Group(day, total.owner, total.project_id or "", *key, total.base_model)
        amounts = found.setdefault(group, _Amounts())
        amounts.train += int(total.amounts["trained_tokens"] + total.amounts["forward_tokens"])
        amounts.prefill += int(total.amounts["prefill_tokens"])
        amounts.cached += int(total.amounts["cached_tokens"])
        amounts.sample += int(total.amounts["sampled_tokens"])
        amounts.engine_seconds += total.amounts["engine_seconds"]
    for each in stored:
        project_id = (each.project_id or "") if by == "project" else ""
        group = _Group(each.day, each.owner, project_id, 0, "", each.base_model)
        found.setdefault(group, _Amounts()).storage += each.byte_days / _GIB / days
    return [
        _billed(group, found[group], prices.of(group.base_model))
        for group in sorted(found, key=lambda group: group.place)
    ]


def _billed(group: _Group, amounts: _Amounts, prices: ModelPrices | None) -> BilledUsage:
    cost = None
    if prices is not None:
        cost = amounts.storage * prices.storage + sum(
            tokens * price / _MILLION
            for tokens, price in (
                (amounts.train, prices.train),
                (amounts.prefill, prices.prefill),
                (amounts.cached, prices.cached),
                (amounts.sample, prices.sample),
            )
        )
    return BilledUsage(
        owner=group.owner,
        project_id=group.project_id or None,
        key_id=group.key_id or None,
        key_name=group.key_name or None,
        day=None if group.day is None else _EPOCH + timedelta(group.day),
        base_model=group.base_model,
        train_tokens=amounts.train,
        prefill_tokens=amounts.prefill,
        cached_tokens=amounts.cached,
        sampled_tokens=amounts.sample,
        engine_seconds=round(amounts.engine_seconds, 6),
        storage_gib_months=float(round(amounts.storage, 6)),
        cost=round(float(cost), COST_DECIMALS) if cost is not None else None,
    )
