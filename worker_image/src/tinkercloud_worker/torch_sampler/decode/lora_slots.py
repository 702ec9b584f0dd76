"""Slots for adapters in captured steps: concatenated in matrices at fixed addresses.

In a slot group, the A matrices are blocks of rows of one matrix and the B matrices blocks of
columns of another (one per expert, where experts are adapted). One product then computes the deltas
of all adapters for all rows of a batch; each row keeps the delta of its own adapter and multiplies
the others by zero. A step is therefore captured for a number of adapters, not for particular ones,
and a published version is copied to its slot before the first step that uses it.

Shape legend: B rows of a step, K total rank of all adapters of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.deltas import can_share_batch
from tinkercloud_worker.lora.segments import ActiveWeights

_MOST_TOGETHER = 8
_MOST_GROUPS = 4


class LoraSlotGroup:
    """Slots for adapters of the same layers, up to a maximum rank."""

    def __init__(self, like: ActiveWeights, dtype: torch.dtype, layout: "SlotLayout") -> None:
        self.layout = layout
        size = layout.slots * layout.rank
        self._tensors = {}
        for name in layout.names:
            shape = list(like.tensors[name].shape)
            shape[_rank_axis(name)] = size
            self._tensors[name] = like.tensors[name].new_zeros(shape, dtype=dtype)
        device = self._tensors[layout.names[0]].device
        self._scales_K = torch.zeros(size, device=device)
        self._slots_K = torch.arange(layout.slots, device=device).repeat_interleave(layout.rank)
        # Weak references: the copy in a slot should not keep unused weights alive.
        self._held: list[Callable[[], ActiveWeights | None]] = [_nothing] * layout.slots

    def holds(self, adapters: Sequence[ActiveWeights]) -> bool:
        """Whether all adapters are in the slots that a step of this many adapters reads."""
        return set(adapters) <= {held() for held in self._held[: padded(len(adapters))]}

    def assign(self, adapters: Sequence[ActiveWeights]) -> dict[ActiveWeights, int]:
        """Return the slot of each adapter, loading adapters that have none."""
        used = padded(len(adapters))
        slots = {
            adapter: slot
            for slot, held in enumerate(self._held[:used])
            if (adapter := held()) is not None and adapter in adapters
        }
        free = [slot for slot in range(used) if slot not in slots.values()]
        for adapter in adapters:
            if adapter not in slots:
                slots[adapter] = free.pop(0)
                self._load(adapter, slots[adapter])
        return slots

    def _load(self, adapter: ActiveWeights, slot: int) -> None:
        start, size = slot * self.layout.rank, self.layout.rank
        for name, tensor in self._tensors.items():
            axis, source = _rank_axis(name), adapter.tensors[name]
            # Clear the remains of an adapter with a larger rank.
            tensor.narrow(axis, start, size).zero_()
            tensor.narrow(axis, start, source.shape[axis]).copy_(source)
        self._scales_K[start : start + size] = _scale(adapter)
        self._held[slot] = ref(adapter)

    def weights(self, slots_B: Tensor, used: int, scale: float | None) -> ActiveWeights:
        """Return the weights of a pass.

        Args:
            slots_B: int64, the slot of each row; -1: no adapter.
            used: the number of slots that the pass uses.
            scale: the scale of the adapter that all rows share; None: rows differ.
        """
        size = used * self.layout.rank
        tensors = {n: tensor.narrow(_rank_axis(n), 0, size) for n, tensor in self._tensors.items()}
        if scale is not None:
            return ActiveWeights(tensors, scale)
        is_own_BK = self._slots_K[:size] == slots_B[:, None]
        return ActiveWeights(tensors, is_own_BK * self._scales_K[:size])


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layers and the size of a slot group."""

    names: tuple[str, ...]
    slots: int
    rank: int

    def including(self, others: "SlotLayout") -> "SlotLayout":
        """Return a layout of the same layers that is large enough for both."""
        return SlotLayout(self.names, max(self.slots, others.slots), max(self.rank, others.rank))


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The slot group and the slots of the adapters of a step."""

    group: LoraSlotGroup | None
    """None: no row has an adapter."""
    slots: Sequence[int]
    """The slot of each row; -1: no adapter."""
    used: int = 0
    """Number of slots that the step uses."""
    scale: float | None = None
    """Scale of the adapter that all rows share; None: rows differ."""


class LoraSlots:
    """All slot groups: one for each set of adapted layers."""

    def __init__(self, targets: Iterable[Target], dtype: torch.dtype) -> None:
        """Create no slot groups yet.

        Args:
            targets: the LoRA targets of the model; the LM head is excluded.
            dtype: the dtype in which deltas are computed.
        """
        self._dtype = dtype
        self._names = {
            name
            for target in targets
            if target.group != "unembed"
            for name in (target.a_name, target.b_name)
        }
        self._groups: list[LoraSlotGroup] = []
        self.generation = 0
        """Changes whenever adapters move in memory."""

    def assign(self, weights: Sequence[ActiveWeights | None]) -> SlotAssignment | None:
        """Assign the adapters of a step to slots; None if they can't share one product.

        Args:
            weights: the weights of each row; None: the base's.
        """
        adapters = list(dict.fromkeys(each for each in weights if each is not None))
        if not adapters:
            return SlotAssignment(None, [-1] * len(weights))
        group = next((g for g in self._groups if g.holds(adapters)), None) or self._group_for(
            adapters
        )
        if group is None:
            return None
        slots = group.assign(adapters)
        is_alone = len(adapters) == 1 and None not in weights
        return SlotAssignment(
            group,
            [slots[each] if each is not None else -1 for each in weights],
            used=padded(len(adapters)),
            scale=_scale(adapters[0]) if is_alone else None,
        )

    def _group_for(self, adapters: Sequence[ActiveWeights]) -> LoraSlotGroup | None:
        """Return a group with enough slots for adapters, enlarging it if necessary."""
        names = tuple(name for name in adapters[0].tensors if name in self._names)
        if not (
            names
            and len(adapters) <= _MOST_TOGETHER
            and all(can_share_batch(each.tensors.values()) for each in adapters)
        ):
            return None
        if any(set(each.tensors) & self._names != set(names) for each in adapters):
            return None
        rank = max(each.tensors[names[0]].shape[_rank_axis(names[0])] for each in adapters)
        wanted = SlotLayout(names, padded(len(adapters)), padded(rank))
        known = next(
            (group for group in self._groups if set(group.layout.names) == set(names)), None
        )
        if known is not None:
            wanted = known.layout.including(wanted)
            if wanted == known.layout:
                return known
        self._groups = [group for group in self._groups if group is not known][1 - _MOST_GROUPS :]
        self._groups.append(LoraSlotGroup(adapters[0], self._dtype, wanted))
        self.generation += 1
        return self._groups[-1]


def padded(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _nothing() -> None:
    return None


def _scale(adapter: ActiveWeights) -> float:
    assert isinstance(adapter.lora_scale, float)  # noqa: S101 - true of all published adapters
    return adapter.lora_scale


def _rank_axis(name: str) -> int:
    # Counted from the end: tensors of experts have an additional first dimension.
    return -2 if name.endswith(".lora_A.weight") else -1
