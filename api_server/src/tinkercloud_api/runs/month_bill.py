"""What a month has cost: tokens and storage, multiplied by the prices of the settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from tinkercloud_api.catalog.usage.stored_days import StoredBytes
from tinkercloud_api.catalog.usage.usage_ledger import UsageTotal
from tinkercloud_api.config.sections.price_settings import ModelPrices, PriceSettings
from tinkercloud_protocol.responses.listings import BilledUsage

_MILLION = Decimal(1_000_000)
_GIB = Decimal(1 << 30)
COST_DECIMALS = 9
"""A token at 0.001 for a million still counts."""


@dataclass(slots=True)
class _Amounts:
    """Tokens, and GiB-months."""

    train: int = 0
    prefill: int = 0
    cached: int = 0
    sample: int = 0
    storage: Decimal = field(default_factory=Decimal)


@dataclass(frozen=True, slots=True, order=True)
class _Group:
    """What a row is of."""

    owner: str
    project_id: str
    key_id: int
    """0 for none."""
    key_name: str
    base_model: str


def bill(
    used: Iterable[UsageTotal],
    stored: Iterable[StoredBytes],
    days: int,
    prices: PriceSettings,
    by: Literal["project", "key"] = "project",
) -> Sequence[BilledUsage]:
    """Return what each owner has used, by base model and project or key, and what it costs.

    Args:
        used: the tokens of the month, by project or key.
        stored: the storage of the month, which has no key.
        days: days of the month.
        prices: the prices.
        by: what the rows are of, in addition to owner and base model.
    """
    found: dict[_Group, _Amounts] = {}
    for total in used:
        key = total.key_id or 0, total.key_name or ""
        group = _Group(total.owner, total.project_id or "", *key, total.base_model)
        amounts = found.setdefault(group, _Amounts())
        amounts.train += int(total.amounts["trained_tokens"] + total.amounts["forward_tokens"])
        amounts.prefill += int(total.amounts["prefill_tokens"])
        amounts.cached += int(total.amounts["cached_tokens"])
        amounts.sample += int(total.amounts["sampled_tokens"])
    for each in stored:
        project_id = (each.project_id or "") if by == "project" else ""
        group = _Group(each.owner, project_id, 0, "", each.base_model)
        found.setdefault(group, _Amounts()).storage += each.byte_days / _GIB / days
    return [_billed(each, found[each], prices.of(each.base_model)) for each in sorted(found)]


def _billed(of: _Group, amounts: _Amounts, prices: ModelPrices | None) -> BilledUsage:
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
        owner=of.owner,
        project_id=of.project_id or None,
        key_id=of.key_id or None,
        key_name=of.key_name or None,
        base_model=of.base_model,
        train_tokens=amounts.train,
        prefill_tokens=amounts.prefill,
        cached_tokens=amounts.cached,
        sampled_tokens=amounts.sample,
        storage_gib_months=float(round(amounts.storage, 6)),
        cost=round(float(cost), COST_DECIMALS) if cost is not None else None,
    )
