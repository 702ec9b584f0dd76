"""KV caches: one for the prefill of a prompt, and slots for running sequences.

`PrefillCache` grows with one prompt; `PackCache` holds several prompts of one pass. `SlotCache`
holds the running sequences, one per slot, each starting at position 0 of its slot; a decoding step
writes one position of every slot and reads all slots up to the longest sequence. Slots have no
gaps, so that a step reads a plain view.

Shape legend: B running sequences, H key-value heads, T new positions, L positions read,
E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True, eq=False)
class LayerKeyValues:
    """One layer's keys and values of one sequence, each [H, L, E]."""

    keys: Tensor
    values: Tensor

    def first(self, length: int) -> "LayerKeyValues":
        """Return the first positions, sharing memory."""
        return LayerKeyValues(self.keys[:, :length], self.values[:, :length])


KeyValues = tuple[LayerKeyValues, ...]


@dataclass(frozen=True, slots=True)
class KvBudget:
    """A number of sequences and tokens for which there is memory."""

    sequences: int
    tokens: int
    """Positions of all sequences together."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of the slots of running sequences, which all have the same number of positions."""

    slots: int
    positions: int

    @property
    def tokens(self) -> int:
        """Positions of all slots together."""
        return self.slots * self.positions

    def grown(self, slots: int, positions: int, max_tokens: int) -> "KvShape":
        """Return a shape with at least this many slots and positions.

        If this shape suffices, it is returned. Otherwise the dimension that is too small doubles,
        and the other one shrinks if it is larger than needed, so that the total exceeds
        `max_tokens` only if needed.
        """
        if slots <= self.slots and positions <= self.positions:
            return self
        length = self.positions if positions <= self.positions else 2 * self.positions
        length = max(positions, min(length, max_tokens // slots))
        count = self.slots if slots <= self.slots else 2 * self.slots
        return KvShape(max(slots, min(count, max_tokens // length)), length)


def length_of(key_values: KeyValues) -> int:
    """Return the number of positions held."""
    return int(key_values[0].keys.shape[1]) if key_values else 0


class _Layer(CacheLayerMixin):
    """The interface of transformers' cache layers, for buffers allocated by this module."""

    end = 0
    """Positions held, from which transformers derives masks."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `update` or the owning cache allocates memory."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions that the next pass reads, and the first of them."""
        return self.end + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of positions held."""
        return self.end

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1


class _PrefillLayer(_Layer):
    def __init__(self, prefix: LayerKeyValues | None, capacity: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.capacity = capacity
        self.end = prefix.keys.shape[1] if prefix is not None else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            _, heads, _, size = key_states.shape
            self.keys = key_states.new_empty(1, heads, self.capacity, size)
            self.values = value_states.new_empty(1, heads, self.capacity, value_states.shape[-1])
            if self.prefix is not None:
                self.keys[0, :, : self.end] = self.prefix.keys
                self.values[0, :, : self.end] = self.prefix.values
        start, self.end = self.end, self.end + key_states.shape[2]
        self.keys[:, :, start : self.end] = key_states
        self.values[:, :, start : self.end] = value_states
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class PrefillCache(Cache):
    """Keys and values of one prompt from position 0, optionally starting with a cached prefix."""

    def __init__(self, num_layers: int, capacity: int, prefix: KeyValues = ()) -> None:
        self._own = [
            _PrefillLayer(prefix[index] if prefix else None, capacity)
            for index in range(num_layers)
        ]
        super().__init__(layers=list(self._own))

    def key_values(self) -> KeyValues:
        """Return the keys and values so far, sharing memory."""
        return tuple(
            LayerKeyValues(layer.keys[0, :, : layer.end], layer.values[0, :, : layer.end])
            for layer in self._own
            if layer.keys is not None and layer.values is not None
        )


class _PackLayer(_Layer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class PackCache(Cache):
    """Keys and values of several prompts, concatenated in one pass."""

    def __init__(self, num_layers: int) -> None:
        self._own = [_PackLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self._own))

    def key_values(self, rows: slice) -> KeyValues:
        """Return the keys and values of one prompt, sharing memory."""
        return tuple(
            LayerKeyValues(layer.keys[0, :, rows], layer.values[0, :, rows])
            for layer in self._own
            if layer.keys is not None and layer.values is not None
        )


class _SlotLayer(_Layer):
    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions that the next pass reads, and the first of them."""
        del query_length
        return self._owner.read_length, 0

    def get_seq_length(self) -> int:
        """Raise: slots have different lengths, so one number would be wrong for most of them.

        Raises:
            NotImplementedError: always; see `decoding_check`.
        """
        raise NotImplementedError("slots hold sequences of different lengths")

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys, self.values
        assert keys is not None  # noqa: S101 - a step runs only after a sequence was inserted
        assert values is not None  # noqa: S101 - as above
        positions_B, rows_B = self._owner.positions_B, self._owner.rows_B
        keys[rows_B, :, positions_B] = key_states[:, :, 0]
        values[rows_B, :, positions_B] = value_states[:, :, 0]
        first, length = self._owner.first_row, self._owner.read_length
        read = slice(first, first + len(positions_B))
        return keys[read, :, :length], values[read, :, :length]


class SlotCache(Cache):
    """Keys and values of the running sequences."""

    def __init__(self, num_layers: int) -> None:
        self._own = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._own))
        self.positions_B = torch.empty(0, dtype=torch.int64)
        """The position that the next step writes, for each running sequence."""
        self.rows_B = self.positions_B
        """The slot of each sequence of the next step: `first_row` and those after it."""
        self.first_row = 0
        self.read_length = 0
        """Positions of each slot that the next step reads."""
        self.generation = 0
        """Changes whenever the buffers of keys and values move in memory."""
        self.max_tokens = 0
        """Limit on the positions of all slots that are allocated ahead of need."""

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return an unused value: `decoding_masks.rows_at` builds masks for each row's position."""
        del layer_idx
        return 0

    @property
    def shape(self) -> "KvShape":
        """The shape of the allocated slots."""
        keys = self._own[0].keys if self._own else None
        return KvShape(keys.shape[0], keys.shape[2]) if keys is not None else KvShape(0, 0)

    def insert(self, slot: int, key_values: KeyValues, length: int) -> None:
        """Copy the keys and values of a sequence into a slot.

        Args:
            slot: the first free slot.
            key_values: the keys and values of the sequence.
            length: the number of positions that this and all earlier slots must have.
        """
        held = length_of(key_values)
        for layer, part in zip(self._own, key_values, strict=True):
            self._make_room(layer, part, slot + 1, length)
            assert layer.keys is not None  # noqa: S101 - just allocated
            assert layer.values is not None  # noqa: S101 - as above
            layer.keys[slot, :, :held] = part.keys
            layer.values[slot, :, :held] = part.values

    def make_room(self, slots: int, length: int) -> None:
        """Give the first slots at least this many positions, unless all are empty.

        The contents of other slots and of later positions may be lost.
        """
        for layer in self._own:
            if layer.keys is not None and layer.values is not None:
                like = LayerKeyValues(layer.keys[0], layer.values[0])
                self._make_room(layer, like, slots, length)

    def _make_room(self, layer: _SlotLayer, like: LayerKeyValues, slots: int, length: int) -> None:
        has = KvShape(layer.keys.shape[0], layer.keys.shape[2]) if layer.keys is not None else None
        shape = (has or KvShape(0, 0)).grown(slots, length, self.max_tokens)
        if shape != has:
            layer.keys = _with_room(layer.keys, like.keys, shape)
            layer.values = _with_room(layer.values, like.values, shape)
            self.generation += 1

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another slot."""
        for layer in self._own:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]

    def begin_step(self, positions_B: Tensor, read_length: int, first_row: int = 0) -> None:
        """Set the positions that the next pass writes and reads; they must be allocated.

        Args:
            positions_B: the position that it writes in each slot.
            read_length: positions of each slot that it reads.
            first_row: the first slot; the others follow it.
        """
        self.positions_B = positions_B
        self.first_row = first_row
        self.rows_B = torch.arange(len(positions_B), device=positions_B.device) + first_row
        self.read_length = read_length

    def clear(self) -> None:
        """Free the memory."""
        self.generation += 1
        for layer in self._own:
            layer.keys = layer.values = None


def _with_room(tensor: Tensor | None, like: Tensor, shape: KvShape) -> Tensor:
    """Return a buffer [slots, H, positions, E] with as much of another's contents as fits."""
    heads, _, size = like.shape
    made = like.new_zeros(shape.slots, heads, shape.positions, size)
    if tensor is not None:
        kept = tensor[: shape.slots, :, : shape.positions]
        made[: kept.shape[0], :, : kept.shape[2]] = kept
    return made
