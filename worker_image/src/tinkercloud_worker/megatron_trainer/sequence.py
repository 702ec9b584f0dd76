"""Packed sequences, and their division over a context-parallel group.

Each sequence is split into two chunks per rank; a rank holds one from the front and its counterpart
from the back, which balances attention. megatron-core's rotary positions assume the same split.
Sequences are padded where necessary, with positions that nothing attends to.

Shape legend: P positions of all sequences, S of them on this rank, sequence by sequence in
ascending order; R positions that belong to an example, M of those on this rank; N sequences.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud_worker.engine.batch import padded_lengths
from tinkercloud_worker.training.collate import Pack


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
class MicroBatch:
    """A pack, and the part of it on this rank."""

    pack: Pack
    sequences: DividedSequences
    ids_S: Tensor
    """int64 token ids; those of padding are arbitrary."""
    kept_M: Tensor
    """int64: indices of the positions on this rank that belong to an example."""
    places_M: Tensor
    """int64: indices of these positions in the pack."""


class SequenceDivision:
    """The division of sequences over the ranks of a group, which may have one rank."""

    def __init__(self, group: ProcessGroup) -> None:
        """Divide sequences over a group."""
        self.group = group
        self.multiple = 2 * group.size() if group.size() > 1 else 1
        """Number of chunks of a sequence; its length must be a multiple of it."""
        self.chunks = self._chunks_of(group.rank())
        """Indices of the chunks on this rank."""

    def micro_batch(self, pack: Pack, pad_to_multiple_of: int) -> MicroBatch:
        """Return this rank's part of a pack.

        Args:
            pack: the full pack, the same on every rank; or a single position without an example.
            pad_to_multiple_of: each sequence is padded to a multiple of this number of tokens,
                itself a multiple of the number of chunks.
        """
        ids_R = pack.sequences.ids_R
        lengths = padded_lengths(pack.sequences.lengths, pad_to_multiple_of)
        places = torch.arange(len(ids_R)).split(pack.sequences.lengths)
        place_P = torch.cat(
            [
                nn.functional.pad(place, (0, length - len(place)), value=-1)
                for place, length in zip(places, lengths, strict=True)
            ]
        )
        place_S = place_P[self._held(lengths, self.group.rank())]
        kept_M = (place_S >= 0).nonzero()[:, 0]
        device = ids_R.device
        return MicroBatch(
            pack=pack,
            sequences=self._sequences(lengths, device),
            ids_S=ids_R[place_S.clamp(min=0).to(device)],
            kept_M=kept_M.to(device),
            places_M=place_S[kept_M].to(device),
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
