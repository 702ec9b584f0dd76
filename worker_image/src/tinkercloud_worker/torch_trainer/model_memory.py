"""The memory that models share on a trainer's device: which are admitted, and how many fit.

What models take is known exactly; what passes take in addition is measured.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinkercloud_protocol.capacity import MOST_REPORTED, HeadCapacity
from tinkercloud_protocol.errors import Overloaded
from tinkercloud_worker.device.memory import Available
from tinkercloud_worker.device.pass_memory import PassMemory, PeakMeter
from tinkercloud_worker.lora.parameters import TensorLayout
from tinkercloud_worker.training.paging import Models, Place
from tinkercloud_worker.training.trained_model import BYTES_PER_PARAMETER, TrainedModel

KEPT_FREE_BYTES = 256 << 20
"""Bytes that new models leave free for passes and sampling, at least."""
_REPORT_SECONDS = 1.0
"""How old the reported capacity may become while passes run."""
_UNLIMITED = 1 << 62
"""More bytes than any device has."""


class ModelMemory:
    """The models of a trainer and the memory of its device. Belongs to the engine's thread."""

    def __init__(self, available: Available, place: Place | None, meter: PeakMeter | None) -> None:
        """Start without models; the arguments are those of `TorchTrainer`."""
        self._available = available
        self._passes = PassMemory(meter)
        self.models = Models(place, lambda size: size - self._room())
        self.capacity: HeadCapacity | None = None
        """What was determined last, which any thread may read; None if nothing limits it."""
        self._determined_at = 0.0

    def check(self, layout: TensorLayout, kind: str, smaller: str) -> None:
        """Check that memory suffices for a new model and for the pending allocations of others.

        Args:
            layout: the tensors of the model.
            kind: what it is, for the message.
            smaller: what to request instead.

        Raises:
            Overloaded: it does not.
        """
        if not self.models:
            # Without models there are no more passes that would show that they take less now.
            self._passes.forget()
        needed = layout.size * BYTES_PER_PARAMETER
        # Otherwise a model that is here could not return for the rest of a request. Without
        # moments, a model counts with its gradient twice: see `TrainedModel.unused_bytes`.
        missing_to_swap = self.models.missing_to_swap(needed + 4 * layout.size)
        swaps = missing_to_swap <= 0
        # Models that are here may return even if the largest pass then has too little memory.
        with_passes = needed + self._kept_for_passes()
        missing = self.models.make_room(with_passes) if swaps else with_passes - self._room()
        if missing > 0 or not swaps:
            loaded = self.models.paged_in()
            note = f"; {missing_to_swap} bytes are missing where idle models are kept"
            raise Overloaded(
                f"lora_config: {kind} has {layout.size} parameters and takes {needed} bytes"
                f" (weights, gradient and moments in float32), but {max(needed - missing, 0)} bytes"
                f" are free: of {self._available()} available bytes, {_promised(loaded)} are"
                f" reserved for the {len(loaded)} models loaded here and"
                f" {KEPT_FREE_BYTES + self._kept_for_passes()} are kept free for passes"
                f"{'' if swaps else note}; end unused sessions, or request {smaller}"
            )

    def _room(self) -> int:
        """Return the bytes for more models, in addition to those that are loaded."""
        available = self._available()
        if available is None:
            return _UNLIMITED
        return available - _promised(self.models.paged_in()) - KEPT_FREE_BYTES

    def _kept_for_passes(self) -> int:
        """Return the bytes that a new model leaves free beyond those that it always does."""
        return max(0, self._passes.bytes - KEPT_FREE_BYTES)

    @contextmanager
    def measured(self, models: Sequence[TrainedModel]) -> Iterator[None]:
        """Measure a pass of models, unless it may allocate what one of them then keeps."""
        if any(model.unused_bytes for model in models):
            yield
            return
        with self._passes.measured():
            yield
        if time.monotonic() - self._determined_at > _REPORT_SECONDS:
            self.determine()

    def determine(self) -> None:
        """Determine the capacity."""
        self._determined_at = time.monotonic()
        if self._available() is None:
            return
        largest = max((model.full_bytes for model in self.models.values()), default=0)
        free = max(0, self._room() - self._kept_for_passes())
        self.capacity = HeadCapacity(
            models=len(self.models.paged_in()),
            model_bytes=largest,
            pass_bytes=self._passes.bytes,
            free_bytes=free,
            more_models=self._more_models(largest, free) if largest else None,
        )

    def _more_models(self, size: int, free: int) -> int:
        """Return how many more models of a size would be admitted, one after another."""
        if not self.models.can_leave:
            return min(free // size, MOST_REPORTED)
        # What is missing grows with their number. At first each has two gradients; see `check`.
        at_first = size + size // 4
        return bisect_left(
            range(MOST_REPORTED),
            1,
            key=lambda before: self.models.missing_to_swap(at_first, before * size),
        )


def _promised(models: Sequence[TrainedModel]) -> int:
    """Return the bytes that models will allocate but may not have allocated yet."""
    return sum(model.unused_bytes for model in models)
