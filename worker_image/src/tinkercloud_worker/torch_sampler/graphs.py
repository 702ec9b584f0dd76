"""A decoding step as one launch: recorded once for each shape, then replayed.

A step of few rows costs a GPU the launching of its thousand kernels. A recorded step reads tokens,
positions, keys and values and adapters at the addresses at which they were when it was recorded,
and writes hidden states where the last replay wrote them, without Python. So shapes are rounded up
to powers of two, adapters are copied to fixed memory (`banks`) before the steps that use them, and
recordings are dropped when anything moves in memory.

The module knows nothing of CUDA: it is given a recorder (`accelerator.GraphRecorder`).

Shape legend: B rows, padded, T = 1 new positions, D hidden size.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud_worker.lora.segments import ActiveWeights, route_all
from tinkercloud_worker.model.base_model import BaseModel
from tinkercloud_worker.torch_sampler.cache import KvBudget, KvShape, SlotCache
from tinkercloud_worker.torch_sampler.lora_slots import AdapterBanks, SlotAssignment, padded
from tinkercloud_worker.torch_sampler.masks import rows_at

log = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
"""Computes something anew from tensors that stay where they are."""
Recorder = Callable[[Compute], Compute]
"""Returns a function that repeats work without Python, and always returns the same tensor."""

_MOST_STEPS = 32
_SHORTEST = 256
"""The fewest positions that a recorded step reads."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    inputs_3B: Tensor
    """Token ids, positions and adapters' slots, int64."""
    compute: Compute


class StepGraphs:
    """Recorded steps over one cache, for rows that run with the base or with adapters."""

    def __init__(self, base: BaseModel, cache: SlotCache, record: Recorder, kept: KvBudget) -> None:
        self._base = base
        self._kept = kept
        self._cache = cache
        self._record = record
        self._banks = AdapterBanks(base.targets, base.dtype)
        self._generations = (0, 0)
        self._steps: OrderedDict[tuple[object, ...], _Step] = OrderedDict()

    @staticmethod
    def shape_for(rows: int, longest: int) -> KvShape:
        """Return the shape that recorded steps read, for so many sequences of so many positions."""
        return KvShape(padded(rows), max(padded(longest), _SHORTEST))

    def make_room(self, rows: int, longest: int) -> None:
        """Allocate ahead of need: recorded steps are dropped whenever memory grows.

        Args:
            rows: sequences.
            longest: positions that the longest of them may come to hold.
        """
        length = self.shape_for(rows, longest).positions
        affordable = padded(self._kept.tokens // length + 1) // 2
        slots = min(padded(self._kept.sequences), affordable)
        if rows <= slots:
            self._cache.make_room(slots, length)

    def hidden(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        weights: Sequence[ActiveWeights | None],
    ) -> Tensor | None:
        """Return the final hidden states [rows, D] of a step; good until the next call.

        None: these adapters can't be computed together in a recorded step.

        Args:
            tokens: the newest of each slot's sequence.
            positions: where it stands.
            weights: its adapter, or None for the base.
        """
        assignment = self._banks.assign(weights)
        if assignment is None:
            return None
        shape = self.shape_for(len(tokens), max(positions) + 1)
        rows, length = shape.slots, shape.positions
        self._cache.make_room(rows, length)
        generations = self._cache.generation, self._banks.generation
        if self._generations != generations:
            self._steps.clear()
            self._generations = generations
        # Rows of padding write to the first position of slots that nobody has yet.
        rest = rows - len(tokens)
        padding = [0] * rest, [0] * rest, [-1] * rest
        inputs = zip((tokens, positions, assignment.slots), padding, strict=True)
        inputs_3B = torch.tensor([[*values, *more] for values, more in inputs])
        step = self._step(inputs_3B, length, assignment)
        step.inputs_3B.copy_(inputs_3B, non_blocking=True)
        return step.compute()[: len(tokens)]

    def _step(self, inputs_3B: Tensor, length: int, assignment: SlotAssignment) -> _Step:
        key = inputs_3B.shape[1], length, assignment.bank, assignment.used, assignment.scale
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        while len(self._steps) >= _MOST_STEPS:
            self._steps.popitem(last=False)
        # Work is done while it is recorded: it must be this step's.
        there_3B = inputs_3B.to(self._base.device)
        step = _Step(there_3B, self._recorded(lambda: self._compute(there_3B, length, assignment)))
        self._steps[key] = step
        return step

    def _recorded(self, compute: Compute) -> Compute:
        try:
            return self._record(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning(
                "decoding steps of this model can't be recorded", extra={"error": str(error)}
            )
            self._record = lambda compute: compute
            return compute

    def _compute(self, inputs_3B: Tensor, length: int, assignment: SlotAssignment) -> Tensor:
        ids_B, positions_B, slots_B = inputs_3B
        bank = assignment.bank
        weights = (
            bank.weights(slots_B, assignment.used, assignment.scale) if bank is not None else None
        )
        self._cache.begin_step(positions_B, length)
        with torch.no_grad(), rows_at(positions_B, added_in=self._base.dtype):
            hidden_BTD = self._base.hidden(
                ids_B[:, None],
                route_all(weights),
                position_ids_BT=positions_B[:, None],
                cache=self._cache,
            )
        return hidden_BTD[:, 0]
