"""How many models fit in the memory of a head's trainer, by what was measured."""

from dataclasses import dataclass

MOST_REPORTED = 1023
"""Largest number of further models that is determined."""


@dataclass(frozen=True, slots=True)
class HeadCapacity:
    """The memory of a trainer's device; with several ranks, of the rank that has the least room.

    A plain class, because trainers do without pydantic, which reads it as a field. All fields are
    of the same moment.
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
    `MOST_REPORTED`; None without a model."""
    held: tuple[str, ...] = ()
    """Ids of all models, idle ones too."""
    rank_bytes: int | None = None
    """Size of an adapter of rank 1 of all weights, with its gradient and moments; one of rank r is
    r times as large. None if it is unknown."""
    with_idle_bytes: int | None = None
    """Bytes for more models on the device if none had left it, which may be negative; None if no
    model can leave."""
    swap_bytes: int | None = None
    """Bytes of the place of idle models, taken or free; None if it is not limited."""
    device_bytes: int | None = None
    """Bytes for one model on the device if all that can leave had left it: a larger one is not
    admitted. None if no model can leave."""

    def more_of(self, size: int, before: int = 0) -> int:
        """Return how many more models of a size would be admitted, one after another.

        Args:
            size: the bytes of each, with its gradient and moments; at least 1.
            before: the bytes of other models that are created before them.

        Returns:
            The number, up to `MOST_REPORTED`.
        """
        if self.with_idle_bytes is None:
            return _within(self.free_bytes - before, size)
        if self.device_bytes is not None and size > self.device_bytes:
            return 0
        if self.swap_bytes is None:
            return MOST_REPORTED
        at_first = bytes_at_first(size)
        beyond = self.swap_bytes - swapped_bytes(0, max(at_first, self.model_bytes))
        room = self.with_idle_bytes + max(0, beyond)
        return _within(room - before - (at_first - size), size)


def bytes_at_first(size: int) -> int:
    """Return the bytes that a new model counts with if it takes `size` bytes with its moments.

    A quarter of them is its gradient. Until the model has moments, that counts twice: once as it
    is allocated, and once in what the model will still allocate.
    """
    return size + size // 4


def swapped_bytes(excess: int, largest: int) -> int:
    """Return the most bytes of idle models that are off the device at the same time.

    Models leave one by one until the needed one fits. So there are at most the excess, the needed
    one, which has not returned yet, and the last that left.

    Args:
        excess: the bytes of all models beyond what the device holds.
        largest: the bytes of the largest model that can leave.
    """
    return excess + 2 * largest


def _within(room: int, size: int) -> int:
    return min(max(0, room) // size, MOST_REPORTED)
