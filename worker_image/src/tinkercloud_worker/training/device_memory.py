"""The models of one process, and the memory of its device that they share with passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_worker.device.memory import Available
from tinkercloud_worker.device.pass_memory import PassMemory, PeakMeter
from tinkercloud_worker.engine.memory_report import MemoryReport
from tinkercloud_worker.lora.parameters import TensorLayout
from tinkercloud_worker.training.paging import Missing, Models, PagingPlace
from tinkercloud_worker.training.trained_model import TrainedModel


def _not_asked(_: int) -> int:
    """Fail: one rank would have a model that another lacks."""
    raise RuntimeError("a model is used that is paged out: the head did not page it in first")


class DeviceMemory:
    """Measures the memory, and admits every model; none is paged out unasked.

    So it is at ranks, for which the head decides. Belongs to one thread.
    """

    def __init__(
        self,
        available: Available = lambda: None,
        place: PagingPlace | None = None,
        meter: PeakMeter | None = None,
        missing: Missing = _not_asked,
    ) -> None:
        """Start without models.

        Args:
            available: returns the free memory of the device; the default limits nothing.
            place: where idle models are moved to if others need their memory; None: they stay.
            meter: measures the memory of passes, so that new models leave as much free for them;
                None: as much as most passes need.
            missing: see `Models`; by default, to look up a model that is paged out fails.
        """
        self._available = available
        self._passes = PassMemory(meter)
        self.models = Models(place, missing)
        self.rank_bytes: int | None = None
        """Bytes of an adapter of rank 1 of all weights, with gradient and moments."""

    @property
    def capacity(self) -> HeadCapacity | None:
        """How many models fit, which any thread may read; None if nothing limits it here."""
        return None

    def report(self) -> MemoryReport:
        """Return what is there now."""
        if not self.models:
            # Without models there are no more passes that would show that they take less now.
            self._passes.forget()
        return MemoryReport(
            available=self._available(),
            pass_bytes=self._passes.bytes,
            has_place=self.models.can_leave,
            place_free=self.models.place_free(),
            models=self.models.sizes(),
        )

    def check(self, layout: TensorLayout, kind: str, smaller: str) -> None:
        """Admit a new model; see `ModelMemory.check`."""

    def determine(self) -> None:
        """Determine the capacity, if it is known here."""

    @contextmanager
    def measured(self, models: Sequence[TrainedModel]) -> Iterator[None]:
        """Measure a pass of models, unless it may allocate what one of them then keeps."""
        if any(model.unused_bytes for model in models):
            yield
            return
        with self._passes.measured():
            yield
