"""Fully fine-tuned models, sharded over ranks as megatron-core divides the base.

Each rank has float32 copies of the weights of its part of the module, with a gradient and moments;
the copies replace the module's own weights in passes. Names and shapes are the module's; exports
use Hugging Face's (`Weight`). Moments are rearranged in the same way as weights, element by
element.

Some weights exist on several ranks of one replica. Norms and routers are on all ranks of a
tensor-parallel group, each with a partial gradient from its own heads or its own positions of a
split sequence. A tied embedding is on the first and the last stage, each with a partial gradient.
All of these gradients are summed, and weights with several copies count once.

Experts are on fewer ranks than the rest, because data-parallel ranks share them. They come last in
flat vectors.

Passes run in the base's dtype, and each weight's gradient is added to the float32 gradient as soon
as it is computed, so that at most one gradient exists in the base's dtype. Embeddings are looked up
in float32 and then rounded, which gives the same result, but sums the gradient of a token over all
of its positions in float32.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from typing_extensions import override

from tinkercloud_worker.engine.ranks import Sharding
from tinkercloud_worker.engine.tensor_slices import Piece, TensorSlice
from tinkercloud_worker.lora.parameters import (
    TensorLayout,
    TensorSpec,
    Trainable,
    gradient_of,
    norm_of,
)

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
_OF_EXPERTS = ".local_experts."


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a rank's part of the module, and its Hugging Face weights."""

    name: str
    slices: Sequence[TensorSlice]
    """This rank's slices of Hugging Face weights."""
    is_divided: bool
    """Whether it is split over a tensor-parallel group."""
    group_rows: Sequence[int]
    """Consecutive rows of each slice: a group of heads, or all rows."""

    @property
    def is_of_an_expert(self) -> bool:
        """Whether it belongs to a routed expert."""
        return _OF_EXPERTS in self.name

    def merge(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's part, merged from full Hugging Face weights."""
        parts = [_as_matrix(block.view_of(whole[block.name])) for block in self.slices]
        if len(parts) == 1:
            return parts[0]
        rows = zip(parts, self.group_rows, strict=True)
        return torch.cat([part.unflatten(0, (-1, n)) for part, n in rows], 1).flatten(0, 1)

    def split(self, merged: Tensor) -> Sequence[Tensor]:
        """Return the slices from which it was merged."""
        if len(self.slices) == 1:
            return [merged]
        groups = merged.unflatten(0, (-1, sum(self.group_rows)))
        return [part.flatten(0, 1) for part in groups.split(list(self.group_rows), 1)]


class MegatronShardedModel(Sharding):
    """See `engine.ranks.Sharding`."""

    def __init__(
        self, module: GPTModel, sources: Mapping[str, Sequence[TensorSlice]], whole: TensorLayout
    ) -> None:
        """Initialize from the base's weights.

        Args:
            module: this rank's part of the base model.
            sources: for each of its weights, the parts that form it without tensor parallelism.
            whole: the layout of the Hugging Face model; tied weights appear once.
        """
        self._weights = _describe(module, sources)
        self._whole = whole
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._copies_of_experts = parallel_state.get_expert_data_parallel_group()
        experts: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
        self.is_whole = self._tensor.size() * self._stages.size() * experts.size() == 1
        base = dict(module.named_parameters())
        specs = [TensorSpec(each.name, tuple(base[each.name].shape)) for each in self._weights]
        self._dense_elements = sum(spec.size for spec in specs if _OF_EXPERTS not in spec.name)
        self.trainable = Trainable(TensorLayout(specs), next(module.parameters()).device)
        self.trainable.layout.fill(self.trainable.flat.detach(), base, "base model")
        dense = [each for each in self._weights if not each.is_of_an_expert]
        self._undivided = {weight.name for weight in dense if not weight.is_divided}
        self._tied: Set[str] = set()
        if self._stages.size() > 1 and module.share_embeddings_and_output_weights:
            self._tied = {_EMBEDDING, _OUTPUT_LAYER} & base.keys()
        self.shared: Set[str] = {each.name for each in self._weights if self._counts(each)}

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights that replace the module's own in a pass, under autograd.

        This excludes the LM head (see `trained_output_layer`). The embedding is float32.
        """
        return {
            name: tensor if name == _EMBEDDING else _rounded(tensor, dtype)
            for name, tensor in self.trainable.tensors.items()
            if name != _OUTPUT_LAYER
        }

    @override
    def pieces(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Piece]:
        shapes = self._whole.shapes()
        for weight in self._weights:
            if weight.name not in tensors:
                continue
            # Splitting copies the weight; on the CPU this needs no GPU memory.
            parts = weight.split(tensors[weight.name].cpu())
            for block, part in zip(weight.slices, parts, strict=True):
                yield Piece(block, shapes[block.name], part.to(dtype).reshape(block.shape))

    @override
    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        self._whole.check(tensors, what)
        for weight in self._weights:
            yield weight.name, weight.merge(tensors)

    @override
    def reduce_gradient(self, gradient: Tensor) -> None:
        views = self.trainable.layout.views(gradient)
        if self._tensor.size() > 1:
            _sum_over([views[name] for name in sorted(self._undivided)], self._tensor)
        if self._tied:
            _sum_over([views[name] for name in self._tied], parallel_state.get_embedding_group())
        if self._copies.size() > 1:
            dist.all_reduce(gradient[: self._dense_elements], group=self._copies)
        if self._copies_of_experts.size() > 1:
            dist.all_reduce(gradient[self._dense_elements :], group=self._copies_of_experts)

    @override
    def unreduce_gradient(self, gradient: Tensor) -> None:
        self._drop(self.trainable.tensors.keys() - self.shared, gradient)

    @override
    def grad_norm(self, gradient: Tensor) -> float:
        counted = gradient.clone()
        self.unreduce_gradient(counted)
        square = norm_of(counted).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _counts(self, weight: Weight) -> bool:
        """Return whether this is the first of the ranks with copies of a weight."""
        if weight.is_of_an_expert:
            return bool(self._copies_of_experts.rank() == 0)
        is_first = self._copies.rank() == 0 and (weight.is_divided or self._tensor.rank() == 0)
        return is_first and not (weight.name in self._tied and self._stages.rank())

    def _drop(self, names: Set[str], gradient: Tensor) -> None:
        views = self.trainable.layout.views(gradient)
        for name in names:
            views[name].zero_()


def _describe(module: GPTModel, sources: Mapping[str, Sequence[TensorSlice]]) -> list[Weight]:
    tensor = parallel_state.get_tensor_model_parallel_group()
    of_experts = parallel_state.get_expert_tensor_parallel_group()
    weights = []
    for name, here in module.named_parameters():
        group = of_experts if _OF_EXPERTS in name else tensor
        slices = sources[name]
        rows = [block.shape[-here.ndim] for block in slices]
        columns = slices[0].shape[1 - here.ndim :] if here.ndim > 1 else ()
        whole = (sum(rows), *columns)
        divided = [dim - here.ndim for dim, size in enumerate(here.shape) if size != whole[dim]]
        for dim in divided:
            slices = [block.chunk(group.rank(), group.size(), dim) for block in slices]
        # Queries, keys and values are interleaved group by group; all gates come before the up
        # projections.
        groups = module.config.num_query_groups if "linear_qkv" in name else group.size()
        group_rows = [count // groups for count in rows]
        weights.append(Weight(name, slices, bool(divided), group_rows))
    return sorted(weights, key=lambda weight: weight.is_of_an_expert)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight for the passes of all micro-batches, each of which accumulates its gradient.

    The weight is a leaf whose gradient is moved as soon as it is complete. The backward of a
    conversion would run last, because the conversion runs first, and gradients would be held until
    then.
    """
    leaf = tensor.detach().to(dtype).requires_grad_()
    leaf.register_post_accumulate_grad_hook(partial(_move_gradient, gradient_of(tensor)))
    return leaf


def _move_gradient(total: Tensor, leaf: Tensor) -> None:
    assert leaf.grad is not None  # noqa: S101 - called once it exists
    total.add_(leaf.grad)
    leaf.grad = None


def _as_matrix(part: Tensor) -> Tensor:
    """Return a part of one expert's weight without the expert dimension."""
    return part.squeeze(0) if part.ndim == 3 else part


def _sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over the ranks of a group, in place and in one collective."""
    if not tensors:
        return
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(joined, group=group)
    for tensor, total in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
