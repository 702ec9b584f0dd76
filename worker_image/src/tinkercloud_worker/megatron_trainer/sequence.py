"""How a sequence is divided over the ranks of a context-parallel group.

It is cut into two chunks for each rank; a rank holds one from the front and its like from the back,
so that all have as much to attend to. megatron-core's rotary positions suppose the same.

Shape legend: T positions of the whole, S of them that a rank holds, in ascending order.
"""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


class SequenceDivision:
    """What a rank holds of each sequence."""

    def __init__(self, group: ProcessGroup) -> None:
        """Divide sequences over a group; over one rank, each is a single chunk."""
        ranks, rank = group.size(), group.rank()
        self.group = group
        self.multiple = 2 * ranks if ranks > 1 else 1
        """Chunks of a sequence, which its length must be a multiple of."""
        self.chunks = (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,)
        """Numbers of those that this rank holds."""
        front = [2 * other for other in range(ranks)]
        back = [2 * other + 1 for other in reversed(range(ranks))]
        self._order = [*front, *back] if ranks > 1 else [0]

    def holds(self, positions: int, device: torch.device) -> Tensor:
        """Return a bool [T]: which positions of a sequence of that length this rank holds."""
        held = torch.zeros(self.multiple, positions // self.multiple, dtype=torch.bool)
        held[list(self.chunks)] = True
        return held.flatten().to(device)

    def part(self, whole_BT: Tensor) -> Tensor:
        """Return this rank's part, [B, S]."""
        chunks = whole_BT.chunk(self.multiple, 1)
        return torch.cat([chunks[number] for number in self.chunks], 1)

    def whole(self, part: Tensor) -> Tensor:
        """Return [T, ...] from all ranks' [S, ...].

        Its gradient at each rank is a part of a sum, which every rank gets for what it holds.
        """
        if self.multiple == 1:
            return part
        gathered: Tensor = gather_from_sequence_parallel_region(part, group=self.group)
        chunks = gathered.chunk(self.multiple)
        return torch.cat([chunks[place] for place in self._order])
