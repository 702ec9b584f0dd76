"""An adapter of a mixture whose experts are divided over ranks.

What each expert has for itself, nearly all of such an adapter, is where the expert is: a rank has a
part of those tensors, or none of layers of other stages. What all experts of a layer share and what
is not about experts is whole at every rank, as adapters are otherwise (`adapters`).

Names are Hugging Face's here as well; the parts come behind all that is whole in flat vectors.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker import lora
from tinkercloud_worker.engine.parameters import Layout, TensorSpec, Trainable
from tinkercloud_worker.megatron_trainer.grouped_experts import Piece

_NOTHING = Piece(((0, 0),) * 3)


class DividedAdapter:
    """See `engine.ranks.Parts`. Made by all ranks together."""

    is_whole = False

    def __init__(
        self,
        targets: Sequence[lora.Target],
        config: LoraConfig,
        pieces: Mapping[str, Piece],
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
        self._shapes = self._whole.shapes()
        self._own = [target.own_name for target in targets if target.experts]
        self._pieces = {name: pieces[name] for name in self._own if name in pieces}
        self._copies = parallel_state.get_expert_data_parallel_group()
        """Ranks that have the same pieces."""
        replicated = self._shapes.keys() - set(self._own)
        specs = [TensorSpec(n, shape) for n, shape in self._shapes.items() if n in replicated]
        self._replicated_elements = sum(spec.size for spec in specs)
        specs += [TensorSpec(n, piece.shape) for n, piece in self._pieces.items()]
        self.trainable = Trainable(Layout(specs), device)
        self._draw(targets, config)
        self._holders = self._find_holders()

    def gather(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Parts.gather`."""
        if dist.get_rank():
            for name in self._pieces if self._copies.rank() == 0 else ():
                dist.send(tensors[name].cpu(), dst=0)
            return {}
        return {
            name: self._join(name, tensors) if name in self._holders else tensors[name].cpu()
            for name in self._shapes
        }

    def cut(self, tensors: Mapping[str, Tensor], what: str) -> Mapping[str, Tensor]:
        """See `Parts.cut`."""
        self._whole.check(tensors, what)
        return {
            name: tensors[name][self._pieces[name].index] if name in self._pieces else tensors[name]
            for name in self.trainable.layout.names()
        }

    def add_up(self, gradient: Tensor) -> None:
        """See `Parts.add_up`: experts' own over the ranks that have the same, the rest over all."""
        replicated, own = self._divide(gradient)
        dist.all_reduce(replicated)
        if self._copies.size() > 1:
            dist.all_reduce(own, group=self._copies)

    def contribute(self, gradient: Tensor) -> None:
        """See `Parts.contribute`."""
        replicated, own = self._divide(gradient)
        if dist.get_rank():
            replicated.zero_()
        if self._copies.rank():
            own.zero_()

    def norm(self, gradient: Tensor) -> float:
        """See `Parts.norm`."""
        replicated, own = self._divide(gradient)
        counted = [replicated] if dist.get_rank() == 0 else []
        counted += [own] if self._copies.rank() == 0 else []
        square = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for part in counted:
            square += torch.linalg.vector_norm(part).double().square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _divide(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a flat vector that are about what is whole here, and about pieces."""
        return flat[: self._replicated_elements], flat[self._replicated_elements :]

    def _draw(self, targets: Sequence[lora.Target], config: LoraConfig) -> None:
        """Write how it begins. Without a seed, ranks that have the same take the first one's."""
        seed = config.seed if config.seed is not None else torch.seed()
        for target in targets:
            tensor = self.trainable.tensors.get(target.a_name)
            if tensor is not None:
                a = lora.initial_a(target, config.rank, seed)
                piece = self._pieces.get(target.a_name)
                tensor.detach().copy_(a if piece is None else a[piece.index])
        replicated, own = self._divide(self.trainable.flat.detach())
        dist.broadcast(replicated, src=0)
        dist.broadcast(own, group=self._copies, group_src=0)

    def _join(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return one of the experts' own tensors at rank 0."""
        whole = torch.empty(self._shapes[name])
        for holder, piece in self._holders[name]:
            part = torch.empty(piece.shape)
            if holder:
                dist.recv(part, src=holder)
            whole[piece.index] = part if holder else tensors[name].cpu()
        return whole

    def _find_holders(self) -> Mapping[str, Sequence[tuple[int, Piece]]]:
        """Return which ranks hand what of experts' own tensors to rank 0: each part once."""
        pieces = self._pieces if self._copies.rank() == 0 else {}
        bounds = [pieces.get(name, _NOTHING).bounds for name in self._own]
        here = torch.tensor(bounds, device=self.trainable.gradient.device)
        of_ranks = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, here)
        held: dict[str, list[tuple[int, Piece]]] = {name: [] for name in self._own}
        for rank, of_rank in enumerate(of_ranks):
            for name, bounds_of_piece in zip(self._own, of_rank.tolist(), strict=True):
                piece = Piece(tuple((start, stop) for start, stop in bounds_of_piece))
                if piece != _NOTHING:
                    held[name].append((rank, piece))
        return held
