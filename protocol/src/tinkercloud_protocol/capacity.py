"""How many models fit in the memory of a head's trainer, by what was measured."""

from dataclasses import dataclass

MOST_REPORTED = 1023
"""Largest number of further models that is determined."""


@dataclass(frozen=True, slots=True)
class HeadCapacity:
    """The memory of a trainer's device; with several ranks, of the rank that has the least room.

    A plain class, because trainers do without pydantic, which reads it as a field.
    """

    models: int
    """Number of models that are in this memory; idle ones may be elsewhere."""
    model_bytes: int
    """Size of the largest model with its gradient and moments; 0 if there is no model."""
    pass_bytes: int
    """Peak of additional memory among recent passes; 0 if unknown."""
    free_bytes: int
    """Free memory for more models, after what existing models and passes will allocate."""

    more_models: int | None = None
    """How many more models of that size would be admitted, counting the place of idle ones, up to
    `MOST_REPORTED`; None without a model, or if the head is of an earlier release."""

    @property
    def max_models(self) -> int | None:
        """How many models of the largest size fit at the same time; None without a model."""
        return self.models + self.free_bytes // self.model_bytes if self.model_bytes else None
