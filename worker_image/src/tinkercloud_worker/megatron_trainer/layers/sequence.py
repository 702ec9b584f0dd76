"""Packed sequences, and their division over a context-parallel group.

Each sequence is split into two chunks per rank; a rank holds one from the front and its counterpart
from the back, which balances attention. megatron-core's rotary positions assume the same split.
Sequences are padded where necessary, with positions that nothing attends to.

A micro-batch has the sequences of one model, or those of several one after another. What a rank
holds of a model is therefore a range too.

Shape legend: P positions of all sequences, S of them on this rank, sequence by sequence in
ascending order; R positions that belong to an example, M of them on this rank; N sequences; K
targets per position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import padded_lengths
from tinkercloud_worker.training.packing import Pack


@dataclass(kw_only=True, eq=False)
class DividedSequences(PackedSeqParams):  # type: ignore[misc] # megatron-core has no types
    """The sequences of a micro-batch as passed to layers: megatron-core's fields and ours."""

    lengths: tuple[int, ...]
    """Positions of each sequence over all ranks."""
    starts_N1: Tensor
    """int32 [N + 1]: the start of each sequence and the end of the last, on the device."""
    positions_S: Tensor
    """int64: the index within its sequence of each position on this rank."""
    order_P: Tensor | None
    """int64: the index of each position in the concatenated parts of all ranks; None with one
    rank."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequencePart:
    """What a micro-batch has of one model."""

    pack: Pack
    """Its examples; it may have none."""
    rows: slice
    """Range of its positions among the R of all packs."""
    held: slice
    """Range among the S positions on this rank."""
    kept: slice
    """Range among the M positions on this rank that belong to an example."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """Packs of one or several models, and the part of them on this rank."""

    parts: Sequence[SequencePart]
    """One for each model, in the order of positions; together they have all positions."""
    sequences: DividedSequences
    ids_S: Tensor
    """int64 token ids; those of padding are arbitrary."""
    kept_M: Tensor
    """int64: indices of the positions on this rank that belong to an example."""
    places_M: Tensor
    """int64, ascending: indices of these positions in the packs."""

    @property
    def has_examples(self) -> bool:
        """Whether any position belongs to an example."""
        return any(part.pack.examples for part in self.parts)

    def targets(self) -> Tensor:
        """Return the targets of all packs, [R, K]. There must be examples."""
        packs = [part.pack for part in self.parts]
        return torch.cat([pack.targets_RK for pack in packs if pack.examples])


class SequenceDivision:
    """The division of sequences over the ranks of a group, which may have one rank."""

    def __init__(self, group: ProcessGroup) -> None:
        """Divide sequences over a group."""
        self.group = group
        self.multiple = 2 * group.size() if group.size() > 1 else 1
        """Number of chunks of a sequence; its length must be a multiple of it."""
        self.chunks = self._chunks_of(group.rank())
        """Indices of the chunks on this rank."""

    def micro_batch(self, packs: Sequence[Pack], pad_to_multiple_of: int) -> MicroBatch:
        """Return this rank's part of packs.

        Args:
            packs: the full packs, each of another model, the same on every rank. At least one has
                a position, which may be without an example.
            pad_to_multiple_of: each sequence is padded to a multiple of this number of tokens,
                itself a multiple of the number of chunks.
        """
        sequences = PackedSequences.joined([pack.sequences for pack in packs])
        ids_R = sequences.ids_R
        lengths = padded_lengths(sequences.lengths, pad_to_multiple_of)
        places = torch.arange(len(ids_R)).split(sequences.lengths)
        place_P = torch.cat(
            [
                nn.functional.pad(place, (0, length - len(place)), value=-1)
                for place, length in zip(places, lengths, strict=True)
            ]
        )
        place_S = place_P[self._held(lengths, self.group.rank())]
        kept_M = (place_S >= 0).nonzero()[:, 0]
        places_M, device = place_S[kept_M], ids_R.device
        return MicroBatch(
            parts=self._parts(packs, lengths, places_M),
            sequences=self._sequences(lengths, device),
            ids_S=ids_R[place_S.clamp(min=0).to(device)],
            kept_M=kept_M.to(device),
            places_M=places_M.to(device),
        )

    def whole(self, part: Tensor, sequences: DividedSequences) -> Tensor:
        """Gather [P, ...] from the [S, ...] of all ranks.

        In the backward pass, the partial gradients of all ranks are summed, and each rank receives
        its own positions.
        """
        if sequences.order_P is None:
            return part
        gathered: Tensor = gather_from_sequence_parallel_region(part, group=self.group)
        return gathered[sequences.order_P]

    def _parts(
        self, packs: Sequence[Pack], lengths: Sequence[int], places_M: Tensor
    ) -> Sequence[SequencePart]:
        """Return the part of each pack.

        Args:
            packs: all packs.
            lengths: padded lengths of all their sequences.
            places_M: see `MicroBatch`, on the CPU.
        """
        rows = list(accumulate((len(pack.sequences.ids_R) for pack in packs), initial=0))
        # Of each sequence every rank holds as many positions.
        ends = [0, *(end // self.group.size() for end in accumulate(lengths))]
        numbers = accumulate((len(pack.sequences.lengths) for pack in packs), initial=0)
        held = [ends[number] for number in numbers]
        kept = torch.searchsorted(places_M, torch.tensor(rows)).tolist()
        ranges = [[slice(*ends) for ends in pairwise(bounds)] for bounds in (rows, held, kept)]
        return [
            SequencePart(pack=pack, rows=own_rows, held=own_held, kept=own_kept)
            for pack, own_rows, own_held, own_kept in zip(packs, *ranges, strict=True)
        ]

    def _chunks_of(self, rank: int) -> tuple[int, ...]:
        return (rank, self.multiple - 1 - rank) if self.multiple > 1 else (0,)

    def _held(self, lengths: tuple[int, ...], rank: int) -> Tensor:
        """Return the positions [S] of sequences on a rank."""
        positions = [
            part.chunk(self.multiple) for part in torch.arange(sum(lengths)).split(lengths)
        ]
        numbers = self._chunks_of(rank)
        return torch.cat([chunks[number] for chunks in positions for number in numbers])

    def _sequences(self, lengths: tuple[int, ...], device: torch.device) -> DividedSequences:
        starts_N1 = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        positions_P = torch.cat([torch.arange(length) for length in lengths])
        ranks = range(self.group.size())
        order_P = torch.cat([self._held(lengths, rank) for rank in ranks]).argsort()
        return DividedSequences(
            qkv_format="thd",
            # On the CPU, because megatron-core reads these numbers in every layer.
            cu_seqlens_q=starts_N1,
            cu_seqlens_kv=starts_N1,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            starts_N1=starts_N1.to(device),
            positions_S=positions_P[self._held(lengths, self.group.rank())].to(device),
            order_P=order_P.to(device) if len(ranks) > 1 else None,
        )
