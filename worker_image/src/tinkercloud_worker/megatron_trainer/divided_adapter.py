"""An adapter of a mixture whose experts are divided over ranks.

What each expert has for itself, nearly all of such an adapter, is where the expert is: a rank has a
part of those tensors, or none of layers of other stages. What all experts of a layer share and what
is not about experts is whole at every rank, as adapters are otherwise (`adapters`).

Names are Hugging Face's here as well; the parts come behind all that is whole in flat vectors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker import lora
from tinkercloud_worker.engine.parameters import Layout, TensorSpec, Trainable, norm_of
from tinkercloud_worker.megatron_trainer.pieces import Holdings, Piece, all_of


class DividedAdapter:
    """See `engine.ranks.Parts`. Made by all ranks together."""

    is_whole = False

    def __init__(
        self,
        targets: Sequence[lora.Target],
        config: LoraConfig,
        pieces: Sequence[Piece],
        device: torch.device,
    ) -> None:
        """Begin as an adapter does that is whole at every rank.

        Args:
            targets: that are adapted.
            config: of the adapter.
            pieces: of the tensors that experts have for themselves, what this rank uses.
            device: of this rank.
        """
        self._whole = lora.layout(targets, config.rank)
        shapes = self._whole.shapes()
        own = {target.own_name for target in targets if target.experts}
        common = [all_of(name, shape) for name, shape in shapes.items() if name not in own]
        self._common_elements = sum(math.prod(piece.shape) for piece in common)
        here = [piece for piece in pieces if piece.name in own]
        self._pieces = {piece.name: piece for piece in [*common, *here]}
        layout = Layout(TensorSpec(name, piece.shape) for name, piece in self._pieces.items())
        self.trainable = Trainable(layout, device)
        self._copies = parallel_state.get_expert_data_parallel_group()
        """Ranks that have the same pieces."""
        # Of ranks that have the same, the first counts.
        self._counts_common = dist.get_rank() == 0
        self._counts_own = self._copies.rank() == 0
        self._draw(targets, config)
        self._counted = common * self._counts_common + here * self._counts_own
        self._holdings = Holdings(shapes, self._counted, device)

    def gather(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See `Parts.gather`."""
        return self._holdings.join((tensors[piece.name] for piece in self._counted), dtype)

    def cut(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        """See `Parts.cut`."""
        self._whole.check(tensors, what)
        for name, piece in self._pieces.items():
            yield name, piece.of(tensors[name])

    def add_up(self, gradient: Tensor) -> None:
        """See `Parts.add_up`: experts' own over the ranks that have the same, the rest over all."""
        common, own = self._divide(gradient)
        dist.all_reduce(common)
        if self._copies.size() > 1:
            dist.all_reduce(own, group=self._copies)

    def contribute(self, gradient: Tensor) -> None:
        """See `Parts.contribute`."""
        common, own = self._divide(gradient)
        if not self._counts_common:
            common.zero_()
        if not self._counts_own:
            own.zero_()

    def norm(self, gradient: Tensor) -> float:
        """See `Parts.norm`."""
        common, own = self._divide(gradient)
        square = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for part, counts in ((common, self._counts_common), (own, self._counts_own)):
            if counts:
                square += norm_of(part).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _divide(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a flat vector that are about what is whole here, and about pieces."""
        return flat[: self._common_elements], flat[self._common_elements :]

    def _draw(self, targets: Sequence[lora.Target], config: LoraConfig) -> None:
        """Write how it begins. Without a seed, ranks that have the same take the first one's."""
        seed = config.seed if config.seed is not None else torch.seed()
        for target in targets:
            piece = self._pieces.get(target.a_name)
            if piece is not None:
                a = lora.initial_a(target, config.rank, seed)
                self.trainable.tensors[target.a_name].detach().copy_(piece.of(a))
        common, own = self._divide(self.trainable.flat.detach())
        dist.broadcast(common, src=0)
        dist.broadcast(own, group=self._copies, group_src=0)
