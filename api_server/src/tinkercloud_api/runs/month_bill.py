"""What a month has cost: tokens and storage, multiplied by the prices of the settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

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


def bill(
    used: Iterable[UsageTotal], stored: Iterable[StoredBytes], days: int, prices: PriceSettings
) -> Sequence[BilledUsage]:
    """Return what each owner has used, by project and base model, and what it costs.

    Args:
        used: the tokens of the month, by project.
        stored: the storage of the month.
        days: days of the month.
        prices: the prices.
    """
    found: dict[tuple[str, str, str], _Amounts] = {}
    for total in used:
        key = (total.owner, total.project_id or "", total.base_model)
        amounts = found.setdefault(key, _Amounts())
        amounts.train += int(total.amounts["trained_tokens"] + total.amounts["forward_tokens"])
        amounts.prefill += int(total.amounts["prefill_tokens"])
        amounts.cached += int(total.amounts["cached_tokens"])
        amounts.sample += int(total.amounts["sampled_tokens"])
    for each in stored:
        key = (each.owner, each.project_id or "", each.base_model)
        found.setdefault(key, _Amounts()).storage += each.byte_days / _GIB / days
    return [_billed(key, amounts, prices.of(key[2])) for key, amounts in sorted(found.items())]


def _billed(
    key: tuple[str, str, str], amounts: _Amounts, prices: ModelPrices | None
) -> BilledUsage:
    owner, project_id, base_model = key
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
        owner=owner,
        project_id=project_id or None,
        base_model=base_model,
        train_tokens=amounts.train,
        prefill_tokens=amounts.prefill,
        cached_tokens=amounts.cached,
        sampled_tokens=amounts.sample,
        storage_gib_months=float(round(amounts.storage, 6)),
        cost=round(float(cost), COST_DECIMALS) if cost is not None else None,
    )
