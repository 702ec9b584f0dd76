"""An adapter of a mixture whose experts are distributed over ranks.

Tensors specific to each expert, which are nearly all of such an adapter, are on the same rank as
the expert: a rank has a part of them, or none for layers of other stages. All other tensors are
replicated on every rank, as in other adapters (`adapters`).

Names are Hugging Face's here too. In flat vectors, sharded tensors follow the replicated ones.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.engine.ranks import Sharding
from tinkercloud_worker.engine.tensor_slices import Piece, TensorSlice, full_slice
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.parameters import TensorLayout, TensorSpec, Trainable, norm_of


class ShardedAdapter(Sharding):
    """See `engine.ranks.Sharding`. All ranks construct it together."""

    is_whole = False

    def __init__(
        self,
        targets: Sequence[adapters.Target],
        config: LoraConfig,
        slices: Sequence[TensorSlice],
        device: torch.device,
    ) -> None:
        """Initialize with the same values as a replicated adapter.

        Args:
            targets: the adapted targets.
            config: the adapter's configuration.
            slices: this rank's slices of tensors that are specific to each expert.
            device: this rank's device.
        """
        self._whole = adapters.layout(targets, config.rank)
        common, here = divide(targets, self._whole, slices)
        self._common_elements = sum(math.prod(block.shape) for block in common)
        self._slices = {block.name: block for block in [*common, *here]}
        layout = TensorLayout(TensorSpec(name, block.shape) for name, block in self._slices.items())
        self.trainable = Trainable(layout, device)
        self._copies = parallel_state.get_expert_data_parallel_group()
        """Ranks with the same slices."""
        # Of ranks with copies, only the first one counts.
        self._counts_common = dist.get_rank() == 0
        self._counts_own = self._copies.rank() == 0
        self._initialize(targets, config)
        counted = common * self._counts_common + here * self._counts_own
        self.shared: Set[str] = {block.name for block in counted}

    @override
    def pieces(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Piece]:
        shapes = self._whole.shapes()
        for name, tensor in tensors.items():
            yield Piece(self._slices[name], shapes[name], tensor.cpu().to(dtype))

    @override
    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        self._whole.check(tensors, what)
        for name, block in self._slices.items():
            yield name, block.view_of(tensors[name])

    @override
    def reduce_gradient(self, gradient: Tensor) -> None:
        """Experts' own are summed over the ranks that have the same, the rest over all."""
        common, own = self._divide(gradient)
        dist.all_reduce(common)
        if self._copies.size() > 1:
            dist.all_reduce(own, group=self._copies)

    @override
    def unreduce_gradient(self, gradient: Tensor) -> None:
        common, own = self._divide(gradient)
        if not self._counts_common:
            common.zero_()
        if not self._counts_own:
            own.zero_()

    @override
    def grad_norm(self, gradient: Tensor) -> float:
        common, own = self._divide(gradient)
        square = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for part, counts in ((common, self._counts_common), (own, self._counts_own)):
            if counts:
                square += norm_of(part).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _divide(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Split a flat vector into replicated tensors and slices."""
        return flat[: self._common_elements], flat[self._common_elements :]

    def _initialize(self, targets: Sequence[adapters.Target], config: LoraConfig) -> None:
        """Write initial values. Without a seed, copies get the values of the first rank."""
        seed = config.seed if config.seed is not None else torch.seed()
        for target in targets:
            block = self._slices.get(target.a_name)
            if block is not None:
                a = adapters.initial_a(target, config.rank, seed)
                self.trainable.tensors[target.a_name].detach().copy_(block.view_of(a))
        common, own = self._divide(self.trainable.flat.detach())
        dist.broadcast(common, src=0)
        dist.broadcast(own, group=self._copies, group_src=0)


def divide(
    targets: Sequence[adapters.Target], whole: TensorLayout, slices: Sequence[TensorSlice]
) -> tuple[list[TensorSlice], list[TensorSlice]]:
    """Return what a rank has of an adapter: its replicated tensors, and its slices of others.

    Args:
        targets: the adapted targets.
        whole: the layout of the whole adapter.
        slices: the rank's slices of tensors that are specific to each expert, of any target.
    """
    own = {target.own_name for target in targets if target.experts}
    common = [full_slice(name, shape) for name, shape in whole.shapes().items() if name not in own]
    return common, [block for block in slices if block.name in own]
