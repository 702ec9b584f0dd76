"""Sequences laid one after another, and how they are divided over a context-parallel group.

Each is cut into two chunks for each rank; a rank holds one from the front and its like from the
back, so that all have as much to attend to. megatron-core's rotary positions suppose the same.
Sequences are padded where that needs it, by positions that nothing attends to.

Shape legend: P positions of all sequences, S of them held here, sequence by sequence in ascending
order; R positions that belong to an example, M of those held here; N sequences.
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
    """The sequences of a micro-batch as layers get them: megatron-core's fields, and ours."""

    lengths: tuple[int, ...]
    """Positions of each sequence, at all ranks together."""
    starts_N1: Tensor
    """int32 [N + 1]: where each begins and the last ends, on the device."""
    positions_S: Tensor
    """int64: where in its sequence each position is that is held here."""
    order_P: Tensor | None
    """int64: where each position lies in all ranks' parts, one after another; None at one rank."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """A pack, and what this rank holds of it."""

    pack: Pack
    sequences: DividedSequences
    ids_S: Tensor
    """int64 token ids; those of padding mean nothing."""
    kept_M: Tensor
    """int64: which of the positions held here belong to an example."""
    places_M: Tensor
    """int64: which of the pack's positions those are."""


class SequenceDivision:
    """How sequences are divided over the ranks of a group; over one rank, they are not."""

    def __init__(self, group: ProcessGroup) -> None:
        """Divide sequences over a group."""
        self.group = group
        self.multiple = 2 * group.size() if group.size() > 1 else 1
        """Chunks of a sequence, which its length must be a multiple of."""
        self.chunks = self._chunks_of(group.rank())
        """Numbers of those that this rank holds."""

    def micro_batch(self, pack: Pack, pad_to_multiple_of: int) -> MicroBatch:
        """Return what this rank holds of a pack.

        Args:
            pack: all of it, at every rank; or a single position that belongs to no example.
            pad_to_multiple_of: tokens that each sequence is padded to a multiple of; itself a
                multiple of the division's own.
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
        """Return [P, ...] from all ranks' [S, ...].

        Its gradient at each rank is a part of a sum, which every rank gets for what it holds.
        """
        if sequences.order_P is None:
            return part
        gathered: Tensor = gather_from_sequence_parallel_region(part, group=self.group)
        return gathered[sequences.order_P]

    def _chunks_of(self, rank: int) -> tuple[int, ...]:
        return (rank, self.multiple - 1 - rank) if self.multiple > 1 else (0,)

    def _held(self, lengths: tuple[int, ...], rank: int) -> Tensor:
        """Return which positions [S] of sequences a rank holds."""
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
            # On the CPU, as megatron-core reads their numbers in every layer.
            cu_seqlens_q=starts_N1,
            cu_seqlens_kv=starts_N1,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            starts_N1=starts_N1.to(device),
            positions_S=positions_P[self._held(lengths, self.group.rank())].to(device),
            order_P=order_P.to(device) if len(ranks) > 1 else None,
        )
