"""An uploaded loss in a request.

Shape legend: N positions of a datum, K targets per position.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_worker.custom_losses.graphs import compiled
from tinkercloud_worker.custom_losses.inputs import DatumInputs, LossInput
from tinkercloud_worker.custom_losses.messages import CostTask, LossTask, LossValues
from tinkercloud_worker.custom_losses.processes import Allowance, LossProcesses

_PATIENCE_SECONDS = 0.05
"""How long a trainer waits for a loss before it computes for others."""


class LossIsComputing(Exception):
    """A loss takes longer than a trainer waits. Nothing has changed: try again when it is done."""

    def __init__(self, done: "Future[Any]") -> None:
        super().__init__("a custom loss is being computed")
        self.done = done


class UploadedLoss:
    """A loss, and what its request may still take. One thread at a time uses it."""

    def __init__(
        self, processes: LossProcesses, owner: str, definition: bytes, allowance: float = 1.0
    ) -> None:
        """Start nothing.

        Args:
            processes: compute the loss.
            owner: whose loss it is.
            definition: the loss, as it is stored; it was checked.
            allowance: factor of the limits of time.
        """
        self._processes = processes
        self._owner = owner
        self._definition = definition
        self._loss = compiled(definition)
        limits = processes.limits
        self._allowed = Allowance(
            limits.max_loss_seconds * allowance, limits.max_loss_cpu_seconds * allowance
        )
        self._computing: tuple[Sequence[DatumInputs], Future[LossValues]] | None = None
        self._metrics: dict[DatumInputs, npt.NDArray[np.float64]] = {}

    @property
    def inputs(self) -> Sequence[LossInput]:
        """What it reads, `logprobs` first."""
        return self._loss.inputs

    def check_cost(self, data: Sequence[DatumInputs]) -> "Future[None]":
        """Check the shapes and the cost for all data of the request.

        The check waits until the owner's other losses are computed. The future raises
        InvalidRequest if the loss does not fit or costs too much, and LossEnded if the check was
        ended.
        """
        limit = self._processes.limits.max_loss_bytes // 2
        task = CostTask(self._definition, Counter(datum.shape for datum in data), limit)
        return self._processes.check_cost(self._owner, self._loss.name, task, self._allowed)

    def values(self, logprobs: Sequence[FloatArray], data: Sequence[DatumInputs]) -> LossValues:
        """Return the losses of some data, and their derivatives.

        Args:
            logprobs: of each datum, float32 [N] or [N, K].
            data: the other inputs of each datum.

        Raises:
            LossIsComputing: it takes long; call this again with the same arguments.
            InvalidRequest: an operation failed.
            LossEnded: it was ended, by its process or by a limit.
        """
        if self._computing is None or self._computing[0] != data:
            task = LossTask(self._definition, logprobs, data, len(self._loss.metric_names))
            done = self._processes.compute(self._owner, self._loss.name, task, self._allowed)
            self._computing = data, done
        done = self._computing[1]
        wait([done], _PATIENCE_SECONDS)
        if not done.done():
            raise LossIsComputing(done)
        values = done.result()
        self._computing = None
        self._metrics.update(zip(data, values.metrics, strict=True))
        return values

    def metrics(self, data: Sequence[DatumInputs]) -> dict[str, float]:
        """Return the metrics of a request that was computed: the sum over its data, or the mean."""
        totals = dict.fromkeys(self._loss.metric_names, 0.0)
        for datum in data:
            for key, value in zip(totals, self._metrics[datum].tolist(), strict=True):
                totals[key] += value
        return {
            key: value / len(data) if key.endswith(":mean") else value
            for key, value in totals.items()
        }
