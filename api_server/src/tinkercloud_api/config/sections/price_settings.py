"""Settings of prices, with which `tinkercloud usage --month` sums up what a month costs."""

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

OTHERS = "*"
"""Name of the prices of all models without prices of their own."""
Price = Annotated[Decimal, Field(ge=0, max_digits=18)]


class ModelPrices(BaseModel):
    """What the use of a base model, and of the models trained from it, costs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    train: Price = Decimal(0)
    """For a million tokens of training, forward passes alone included."""
    prefill: Price = Decimal(0)
    """For a million tokens of prompts that were computed."""
    cached: Price = Decimal(0)
    """For a million tokens of prompts that were found in a cache."""
    sample: Price = Decimal(0)
    """For a million sampled tokens."""
    storage: Price = Decimal(0)
    """For a GiB of checkpoints, kept for a month."""


class PriceSettings(BaseModel):
    """Prices by base model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    currency: Annotated[str, Field(min_length=1, max_length=16)] = "USD"
    """Currency of all prices, which reports show."""
    models: dict[str, ModelPrices] = Field(default_factory=dict)
    """Prices by name of the base model; those of `*` apply to all others. Fields: `train`,
    `prefill`, `cached`, `sample` and `storage`, as in docs/operate/operations.md."""

    def of(self, base_model: str) -> ModelPrices | None:
        """Return the prices of a base model; None if it has none."""
        return self.models.get(base_model, self.models.get(OTHERS))
