"""Decoding steps as captured graphs: captured once for each shape, then replayed in one launch.

The time of a step with few rows is dominated by launching its thousand kernels. A captured step
runs without Python: it reads tokens, positions, keys, values and adapters at the addresses from its
capture, and always writes hidden states to the same memory. Shapes are therefore rounded up to
powers of two, adapters are copied to fixed memory (`lora_slots`) before the steps that use them,
and graphs are dropped when anything moves in memory.

The module is independent of CUDA: it receives a graph capturer (`accelerator.GraphCapturer`).

Shape legend: B rows, padded, T = 1 new positions, D hidden size.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud_worker.lora.segments import ActiveWeights, single_segment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.decoding_masks import rows_at
from tinkercloud_worker.torch_sampler.decode.kv_cache import KvBudget, KvShape, SlotCache
from tinkercloud_worker.torch_sampler.decode.lora_slots import LoraSlots, SlotAssignment, padded

log = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
"""Computes a tensor from inputs at fixed addresses."""
GraphCapturer = Callable[[Compute], Compute]
"""Captures a computation: returns a function that replays it and always returns the same tensor."""

_MOST_STEPS = 32
_SHORTEST = 256
"""Minimum number of positions that a captured step reads."""


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    inputs_4B: Tensor
    """Token ids, positions, rotary positions and adapter slots, int64."""
    compute: Compute


class CapturedSteps:
    """The captured steps of one cache, for rows that run with the base or with adapters."""

    def __init__(
        self, base: TorchBaseModel, cache: SlotCache, graph_capturer: GraphCapturer, kept: KvBudget
    ) -> None:
        self._base = base
        self._kept = kept
        self._cache = cache
        self._capture = graph_capturer
        self._lora_slots = LoraSlots(base.targets, base.dtype)
        self._generations = (0, 0)
        self._steps: OrderedDict[tuple[object, ...], _CapturedStep] = OrderedDict()

    @staticmethod
    def shape_for(rows: int, longest: int) -> KvShape:
        """Return the shape that captured steps read for this many sequences, the longest given."""
        return KvShape(padded(rows), max(padded(longest), _SHORTEST))

    def make_room(self, rows: int, longest: int) -> None:
        """Allocate ahead of need, because captured steps are dropped whenever memory grows.

        Args:
            rows: the number of sequences.
            longest: the maximum positions that one of them may occupy.
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
        rotary: Sequence[int],
        weights: Sequence[ActiveWeights | None],
    ) -> Tensor | None:
        """Return the final hidden states [rows, D] of a step; valid until the next call.

        None: these adapters can't be computed together in a captured step.

        Args:
            tokens: the newest token of each slot's sequence.
            positions: the position of that token.
            rotary: its rotary position.
            weights: the adapter of each sequence, or None for the base.
        """
        assignment = self._lora_slots.assign(weights)
        if assignment is None:
            return None
        shape = self.shape_for(len(tokens), max(positions) + 1)
        rows, length = shape.slots, shape.positions
        self._cache.make_room(rows, length)
        generations = self._cache.generation, self._lora_slots.generation
        if self._generations != generations:
            self._steps.clear()
            self._generations = generations
        # Padding rows write to the first position of unused slots.
        rest = rows - len(tokens)
        padding = [0] * rest, [0] * rest, [0] * rest, [-1] * rest
        inputs = zip((tokens, positions, rotary, assignment.slots), padding, strict=True)
        inputs_4B = torch.tensor([[*values, *more] for values, more in inputs])
        step = self._step(inputs_4B, length, assignment)
        step.inputs_4B.copy_(inputs_4B, non_blocking=True)
        return step.compute()[: len(tokens)]

    def _step(self, inputs_4B: Tensor, length: int, assignment: SlotAssignment) -> _CapturedStep:
        key = inputs_4B.shape[1], length, assignment.group, assignment.used, assignment.scale
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        while len(self._steps) >= _MOST_STEPS:
            self._steps.popitem(last=False)
        # Capturing also computes, so the inputs must be those of this step.
        there_3B = inputs_4B.to(self._base.device)
        step = _CapturedStep(
            there_3B, self._captured(lambda: self._compute(there_3B, length, assignment))
        )
        self._steps[key] = step
        return step

    def _captured(self, compute: Compute) -> Compute:
        try:
            return self._capture(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning(
                "decoding steps of this model can't be captured", extra={"error": str(error)}
            )
            self._capture = lambda compute: compute
            return compute

    def _compute(self, inputs_4B: Tensor, length: int, assignment: SlotAssignment) -> Tensor:
        ids_B, positions_B, rotary_B, slots_B = inputs_4B
        group = assignment.group
        weights = (
            group.weights(slots_B, assignment.used, assignment.scale) if group is not None else None
        )
        self._cache.begin_step(positions_B, length)
        with torch.no_grad(), rows_at(positions_B, added_in=self._base.dtype):
            hidden_BTD = self._base.hidden(
                ids_B[:, None],
                single_segment(weights),
                position_ids_BT=rotary_B[:, None],
                cache=self._cache,
            )
        return hidden_BTD[:, 0]
