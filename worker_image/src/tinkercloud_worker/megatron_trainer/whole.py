"""Whole models under training, divided over ranks as megatron-core divides the base.

Each rank has float32 copies of the weights of its part of the module, which take the module's place
in passes, with a gradient and moments. Names and shapes are the module's; what leaves the ranks has
Hugging Face's (`Weight`). Moments are rearranged as weights are: element by element.

Three kinds of weights are at more than one rank that holds the model between them. Norms are at all
ranks of a tensor-parallel group, which work out the same gradient for them, unless each does so
from its own heads, or from its own positions of a divided sequence: then it is a part. An embedding
that is the output layer too is at the first and the last stage, each with a part of its gradient.
All of these are summed, and what is the same at several ranks counts once.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tinkercloud_worker.engine.parameters import Layout, TensorSpec, Trainable

_OF_OWN_HEADS = ("q_layernorm.weight", "k_layernorm.weight")
_EMBEDDINGS = {"embedding.word_embeddings.weight", "output_layer.weight"}
_NOBODY = 1 << 30


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a rank's part of the module, and the Hugging Face weights it is made of."""

    name: str
    sources: Sequence[str]
    divided_dim: int | None
    """Along which a tensor-parallel group divides it, and each of its sources; None: not at all."""
    group_rows: Sequence[int]
    """Rows here of each source that follow each other: a group of heads, or all there are."""

    def merge(self, sources: Sequence[Tensor]) -> Tensor:
        """Return it, made of this rank's parts of the sources."""
        if len(sources) == 1:
            return sources[0]
        rows = zip(sources, self.group_rows, strict=True)
        return torch.cat([part.unflatten(0, (-1, n)) for part, n in rows], 1).flatten(0, 1)

    def split(self, merged: Tensor) -> Sequence[Tensor]:
        """Return what it is made of."""
        if len(self.sources) == 1:
            return [merged]
        groups = merged.unflatten(0, (-1, sum(self.group_rows)))
        return [part.flatten(0, 1) for part in groups.split(list(self.group_rows), 1)]


class DividedModel:
    """See `engine.ranks.Parts`. Made by all ranks together."""

    def __init__(
        self, module: GPTModel, sources: Mapping[str, Sequence[str]], whole: Layout
    ) -> None:
        """Begin from the base's weights.

        Args:
            module: this rank's part of the base.
            sources: of each of its weights, the Hugging Face weights it is made of.
            whole: the Hugging Face model's, which is no mixture of experts; tied weights once.
        """
        self._weights = weights = _describe(module, sources, whole)
        self._whole = whole
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.is_whole = self._tensor.size() * self._stages.size() == 1
        base = dict(module.named_parameters())
        self.trainable = Trainable(
            Layout(TensorSpec(weight.name, tuple(base[weight.name].shape)) for weight in weights),
            next(module.parameters()).device,
        )
        self.trainable.layout.fill(self.trainable.flat.detach(), base, "base model")
        self._undivided = {weight.name for weight in weights if weight.divided_dim is None}
        self._alike: Set[str] = set()
        if not module.config.sequence_parallel:
            self._alike = {n for n in self._undivided if not n.endswith(_OF_OWN_HEADS)}
        self._tied: Set[str] = set()
        if self._stages.size() > 1 and module.share_embeddings_and_output_weights:
            self._tied = _EMBEDDINGS & base.keys()
        self._owners = self._find_owners()

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what takes the place of the module's weights in a pass, under autograd."""
        return {name: tensor.to(dtype) for name, tensor in self.trainable.tensors.items()}

    def count_once(self) -> None:
        """Drop the gradients that the first rank of the tensor-parallel group has just the same."""
        if self._tensor.rank() != 0:
            self._drop(self._alike, self.trainable.gradient)

    def gather(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Parts.gather`: over each tensor-parallel group, then from each stage."""
        if self._copies.rank() != 0 and not self.is_whole:
            return {}
        here: dict[str, Tensor] = {}
        for weight in self._weights:
            parts = self._gather_part(tensors[weight.name], weight)
            if not parts:
                continue
            sources = zip(*(weight.split(part) for part in parts), strict=True)
            for name, source in zip(weight.sources, sources, strict=True):
                divided = weight.divided_dim is not None
                whole = torch.cat(source, weight.divided_dim or 0) if divided else source[0]
                here[name] = whole.cpu()
        return here if self.is_whole else self._gather_stages(here)

    def cut(self, tensors: Mapping[str, Tensor], what: str) -> Mapping[str, Tensor]:
        """See `Parts.cut`."""
        self._whole.check(tensors, what)
        parts = {}
        for weight in self._weights:
            sources = [self._part(tensors[source], weight) for source in weight.sources]
            parts[weight.name] = weight.merge(sources)
        return parts

    def add_up(self, gradient: Tensor) -> None:
        """See `Parts.add_up`."""
        views = self.trainable.layout.views(gradient)
        if self._tensor.size() > 1:
            _sum_over([views[name] for name in sorted(self._undivided)], self._tensor)
        if self._tied:
            _sum_over([views[name] for name in self._tied], parallel_state.get_embedding_group())
        if self._copies.size() > 1:
            dist.all_reduce(gradient, group=self._copies)

    def contribute(self, gradient: Tensor) -> None:
        """See `Parts.contribute`."""
        if self._copies.rank() != 0:
            gradient.zero_()
        if self._tensor.rank() != 0:
            self._drop(self._undivided, gradient)
        if self._stages.rank() != 0:
            self._drop(self._tied, gradient)

    def norm(self, gradient: Tensor) -> float:
        """See `Parts.norm`."""
        counted = gradient.clone()
        self.contribute(counted)
        square = torch.linalg.vector_norm(counted).double().square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _drop(self, names: Set[str], gradient: Tensor) -> None:
        views = self.trainable.layout.views(gradient)
        for name in names:
            views[name].zero_()

    def _part(self, whole: Tensor, weight: Weight) -> Tensor:
        if weight.divided_dim is None:
            return whole
        part: Tensor = whole.chunk(self._tensor.size(), weight.divided_dim)[self._tensor.rank()]
        return part

    def _gather_part(self, tensor: Tensor, weight: Weight) -> Sequence[Tensor]:
        """Return the parts of a weight at the group's first rank; nothing at the others."""
        is_first = self._tensor.rank() == 0
        if weight.divided_dim is None or self._tensor.size() == 1:
            return [tensor] if is_first else []
        parts = [torch.empty_like(tensor) for _ in range(self._tensor.size())] if is_first else None
        dist.gather(tensor, parts, group=self._tensor, group_dst=0)
        return parts or []

    def _gather_stages(self, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rank, whole = dist.get_rank(), {}
        for name, shape in self._whole.shapes().items():
            if rank == self._owners[name]:
                whole[name] = here[name]
                if rank:
                    dist.send(here[name].contiguous(), dst=0)
            elif rank == 0:
                whole[name] = torch.empty(shape)
                dist.recv(whole[name], src=self._owners[name])
        return {} if rank else whole

    def _find_owners(self) -> Mapping[str, int]:
        """Return the rank that hands each Hugging Face weight to rank 0: the first that has it."""
        names = list(self._whole.names())
        sources = {source for weight in self._weights for source in weight.sources}
        rank = dist.get_rank()
        owners = torch.tensor([rank if name in sources else _NOBODY for name in names])
        owners = owners.to(self.trainable.gradient.device)
        dist.all_reduce(owners, op=dist.ReduceOp.MIN)
        return dict(zip(names, owners.tolist(), strict=True))


def _describe(
    module: GPTModel, sources: Mapping[str, Sequence[str]], whole: Layout
) -> list[Weight]:
    shapes, weights = whole.shapes(), []
    for name, here in module.named_parameters():
        made_of = [shapes[source] for source in sources[name]]
        shape = (sum(rows for rows, *_ in made_of), *made_of[0][1:])
        divided = (dim for dim, size in enumerate(here.shape) if size != shape[dim])
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        # Queries, keys and values are arranged group by group; gates come before all of what they
        # gate.
        groups = module.config.num_query_groups if "linear_qkv" in name else ranks
        group_rows = [rows // groups for rows, *_ in made_of]
        weights.append(Weight(name, sources[name], next(divided, None), group_rows))
    return weights


def _sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the ranks of a group, in place and all at once."""
    if not tensors:
        return
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(joined, group=group)
    for tensor, total in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
