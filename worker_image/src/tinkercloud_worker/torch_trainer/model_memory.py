"""The memory that models share on a trainer's device: which are admitted, and how many fit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from typing_extensions import override

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_worker.device.memory import Available
from tinkercloud_worker.device.pass_memory import PeakMeter
from tinkercloud_worker.lora.parameters import TensorLayout
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.paging import PagingPlace
from tinkercloud_worker.training.trained_model import TrainedModel

_REPORT_SECONDS = 1.0
"""How old the reported capacity may become while passes run."""


class ModelMemory(DeviceMemory):
    """The models of a trainer of one process, which decides by itself.

    Belongs to the engine's thread.
    """

    def __init__(
        self, available: Available, place: PagingPlace | None = None, meter: PeakMeter | None = None
    ) -> None:
        """Start without models; the arguments are those of `DeviceMemory`."""
        super().__init__(available, place, meter, lambda size: self.report().missing(size))
        self._capacity: HeadCapacity | None = None
        self._determined_at = 0.0

    @property
    @override
    def capacity(self) -> HeadCapacity | None:
        return self._capacity

    @override
    def check(self, layout: TensorLayout, kind: str, smaller: str) -> None:
        """Check that memory suffices for a new model and for the pending allocations of others.

        Args:
            layout: the tensors of the model.
            kind: what it is, for the message.
            smaller: what to request instead.

        Raises:
            Overloaded: it does not.
        """
        report = self.report()
        needed = report.needed_for(layout.size)
        can_swap = report.missing_to_swap(layout.size) <= 0
        missing = self.models.make_room(needed) if can_swap else 1
        if missing > 0:
            raise Overloaded(self.report().refusal(layout.size, kind, smaller))

    @contextmanager
    @override
    def measured(self, models: Sequence[TrainedModel]) -> Iterator[None]:
        with super().measured(models):
            yield
        if time.monotonic() - self._determined_at > _REPORT_SECONDS:
            self.determine()

    @override
    def determine(self) -> None:
        """Determine the capacity."""
        self._determined_at = time.monotonic()
        capacity = self.report().capacity()
        if capacity is not None:
            capacity = replace(capacity, rank_bytes=self.rank_bytes)
        self._capacity = capacity
