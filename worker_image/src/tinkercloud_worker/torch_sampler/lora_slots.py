"""Banks of adapters for recorded steps: side by side in matrices whose memory never moves.

The A's of a bank are blocks of rows of one matrix, the B's blocks of columns of another (of one for
each expert, where those are adapted), so that one product has the terms of all adapters for all
rows of a batch; of those a row keeps its own adapter's and multiplies the others' with zero. So a
step is recorded for a number of adapters, not for which they are, and a published version is copied
to its place before the first step it is in.

Shape legend: B rows of a step, K ranks of all adapters that a step uses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.linear import may_be_beside_others
from tinkercloud_worker.lora.segments import ActiveWeights

_MOST_TOGETHER = 8
_MOST_BANKS = 4


class AdapterBank:
    """Slots for adapters of the same layers, up to a rank."""

    def __init__(self, like: ActiveWeights, dtype: torch.dtype, places: "_Places") -> None:
        self.places = places
        size = places.slots * places.rank
        self._tensors = {}
        for name in places.names:
            shape = list(like.tensors[name].shape)
            shape[_rank_axis(name)] = size
            self._tensors[name] = like.tensors[name].new_zeros(shape, dtype=dtype)
        device = self._tensors[places.names[0]].device
        self._scales_K = torch.zeros(size, device=device)
        self._slots_K = torch.arange(places.slots, device=device).repeat_interleave(places.rank)
        # What nobody else has any more need not be kept for the copy's sake.
        self._held: list[Callable[[], ActiveWeights | None]] = [_nothing] * places.slots

    def holds(self, adapters: Sequence[ActiveWeights]) -> bool:
        """Whether adapters are in the slots that a step for as many reads."""
        return set(adapters) <= {held() for held in self._held[: padded(len(adapters))]}

    def assign(self, adapters: Sequence[ActiveWeights]) -> dict[ActiveWeights, int]:
        """Return the slot of each adapter; load those that have none."""
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
        start, size = slot * self.places.rank, self.places.rank
        for name, tensor in self._tensors.items():
            axis, source = _rank_axis(name), adapter.tensors[name]
            # What an adapter of a larger rank left there counts for nothing.
            tensor.narrow(axis, start, size).zero_()
            tensor.narrow(axis, start, source.shape[axis]).copy_(source)
        self._scales_K[start : start + size] = _scale(adapter)
        self._held[slot] = ref(adapter)

    def weights(self, slots_B: Tensor, used: int, scale: float | None) -> ActiveWeights:
        """Return the weights that a pass runs with.

        Args:
            slots_B: int64, each row's slot; -1: it has no adapter.
            used: slots the pass computes with.
            scale: of the one adapter that all rows have; None: rows differ.
        """
        size = used * self.places.rank
        tensors = {n: tensor.narrow(_rank_axis(n), 0, size) for n, tensor in self._tensors.items()}
        if scale is not None:
            return ActiveWeights(tensors, scale)
        is_own_BK = self._slots_K[:size] == slots_B[:, None]
        return ActiveWeights(tensors, is_own_BK * self._scales_K[:size])


@dataclass(frozen=True, slots=True)
class _Places:
    """The size of a bank."""

    names: tuple[str, ...]
    slots: int
    rank: int

    def including(self, others: "_Places") -> "_Places":
        """Return the size that is large enough for either, of the same layers."""
        return _Places(self.names, max(self.slots, others.slots), max(self.rank, others.rank))


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """Which slots of which bank hold the adapters of a step."""

    bank: AdapterBank | None
    """None: no row has one."""
    slots: Sequence[int]
    """Each row's; -1: it has none."""
    used: int = 0
    """Slots that the step computes with."""
    scale: float | None = None
    """Of the one adapter that all rows have; None: rows differ."""


class AdapterBanks:
    """A bank for each set of layers that adapters have."""

    def __init__(self, targets: Iterable[Target], dtype: torch.dtype) -> None:
        """Make no bank yet.

        Args:
            targets: what of the model can be adapted; the output embedding is left out.
            dtype: in which low-rank terms are computed.
        """
        self._dtype = dtype
        self._names = {
            name
            for target in targets
            if target.group != "unembed"
            for name in (target.a_name, target.b_name)
        }
        self._banks: list[AdapterBank] = []
        self.generation = 0
        """Changes whenever adapters move in memory."""

    def assign(self, weights: Sequence[ActiveWeights | None]) -> SlotAssignment | None:
        """Assign the adapters of a step to bank slots; None if they can't share one product.

        Args:
            weights: of each row; None: the base's.
        """
        adapters = list(dict.fromkeys(each for each in weights if each is not None))
        if not adapters:
            return SlotAssignment(None, [-1] * len(weights))
        bank = next((b for b in self._banks if b.holds(adapters)), None) or self._bank(adapters)
        if bank is None:
            return None
        slots = bank.assign(adapters)
        is_alone = len(adapters) == 1 and None not in weights
        return SlotAssignment(
            bank,
            [slots[each] if each is not None else -1 for each in weights],
            used=padded(len(adapters)),
            scale=_scale(adapters[0]) if is_alone else None,
        )

    def _bank(self, adapters: Sequence[ActiveWeights]) -> AdapterBank | None:
        """Return a bank that has enough slots for adapters, enlarged if need be."""
        names = tuple(name for name in adapters[0].tensors if name in self._names)
        if not (
            names
            and len(adapters) <= _MOST_TOGETHER
            and all(may_be_beside_others(each.tensors.values()) for each in adapters)
        ):
            return None
        if any(set(each.tensors) & self._names != set(names) for each in adapters):
            return None
        rank = max(each.tensors[names[0]].shape[_rank_axis(names[0])] for each in adapters)
        wanted = _Places(names, padded(len(adapters)), padded(rank))
        known = next((bank for bank in self._banks if set(bank.places.names) == set(names)), None)
        if known is not None:
            wanted = known.places.including(wanted)
            if wanted == known.places:
                return known
        self._banks = [bank for bank in self._banks if bank is not known][1 - _MOST_BANKS :]
        self._banks.append(AdapterBank(adapters[0], self._dtype, wanted))
        self.generation += 1
        return self._banks[-1]


def padded(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _nothing() -> None:
    return None


def _scale(adapter: ActiveWeights) -> float:
    assert isinstance(adapter.lora_scale, float)  # noqa: S101 - true of all that are published
    return adapter.lora_scale


def _rank_axis(name: str) -> int:
    # From the end: those of experts have one more before.
    return -2 if name.endswith(".lora_A.weight") else -1
