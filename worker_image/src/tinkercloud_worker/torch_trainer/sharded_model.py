"""A whole model under training, sharded over ranks layer by layer (FSDP2).

Each rank has its part of every weight, with its gradient and moments, in float32: a slice along the
first dimension that the number of ranks divides. torch rounds a layer's weights to the base's dtype
and gathers them while the layer computes, forward and backward. It sums gradients in float32, and
leaves each rank its part. Weights outside the layers (embeddings, the last norm) are whole at every
rank from the forward pass to the end of the backward pass, so that the output layer can be computed
between the two.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.device.packing import PackedSequences, mask_kinds
from tinkercloud_worker.engine.ranks import Sharding
from tinkercloud_worker.lora.experts import find_experts, guard_gradients
from tinkercloud_worker.lora.parameters import Layout, TensorSpec, Trainable, gradient_of, norm_of
from tinkercloud_worker.model.architecture import logits_factor, trunk_and_head
from tinkercloud_worker.model.base_model import BaseModel, layers_of
from tinkercloud_worker.model.lm_head import Unembedding
from tinkercloud_worker.model.router_counts import RouterCounts


class ShardedModel(Sharding):
    """See `engine.ranks.Sharding`. All ranks of the mesh make the same passes in one order."""

    is_whole = False

    def __init__(self, base: BaseModel, mesh: DeviceMesh, *, recompute: bool) -> None:
        """Begin from the base's weights, of which one at a time is whole here.

        Args:
            base: shared out over the mesh, or whole.
            mesh: one dimension, all ranks.
            recompute: whether layers keep only their inputs for the backward pass.

        Raises:
            InvalidRequest: no dimension of a weight can be divided by so many ranks.
        """
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        weights = base.named_weights()
        self._layout = Layout.of(weights)
        self._dims = {name: _divided_dim(name, w, self._ranks) for name, w in weights.items()}
        self.trainable = Trainable(
            Layout(TensorSpec(name, self._part_shape(name, w)) for name, w in weights.items()),
            base.device,
        )
        views = self.trainable.layout.views(self.trainable.flat.detach())
        for name, weight in weights.items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            views[name].copy_(self._part(name, whole))
        self._model = base.without_weights()
        self._head_gradients: dict[str, Tensor] = {}
        """Of the pass whose backward pass is to follow."""
        self._shard(mesh, base.dtype, base.router_counts, recompute=recompute)

    def hidden(self, sequences: PackedSequences) -> Tensor:
        """Return the final hidden states [R, D].

        If gradients are recorded, a backward pass from them is to follow at every rank.
        """
        arguments = sequences.arguments(mask_kinds(self._model.config))
        hidden_RD: Tensor = self._model(**arguments).last_hidden_state[0]
        factor = logits_factor(self._model.config)
        if factor != 1:
            hidden_RD = hidden_RD * factor
        if torch.is_grad_enabled():
            self._head_gradients = {
                name: torch.zeros_like(weight, dtype=torch.float32)
                for name, weight in self._head.named_parameters()
            }
        return hidden_RD

    def unembedding(self) -> Unembedding:
        """Return the output layer, which is there between `hidden` and `backward`."""
        weight, bias = cast("Tensor", self._head.weight), getattr(self._head, "bias", None)
        of_pass = self._head_gradients
        gradients = (of_pass["weight"], of_pass.get("bias")) if of_pass else None
        return Unembedding(FrozenLinear(weight, bias, packed=False), (), gradients)

    def backward(self, hidden_RD: Tensor, gradient_RD: Tensor) -> None:
        """Run the trunk's backward pass, which also sums the output layer's gradient over ranks."""
        for name, weight in self._head.named_parameters():
            weight.grad = self._head_gradients[name].to(weight.dtype)
        self._head_gradients = {}
        hidden_RD.backward(gradient_RD)

    def release(self) -> None:
        """Free what the last pass gathered, if no backward pass did."""
        cast("FSDPModule", self._model).reshard()

    @override
    def gather(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        whole = {}
        for name, tensor in tensors.items():
            # Over gloo: on a GPU rank 0 may have no room for a whole weight, nor NCCL for buffers.
            part = tensor.cpu().to(dtype)
            # Rank 0 of these holds one whole weight at a time beside what it returns.
            parts = [torch.empty_like(part) for _ in range(self._ranks)] if not self._rank else None
            dist.gather(part, parts, dst=0)
            if parts is not None:
                whole[name] = torch.cat(parts, self._dims[name])
        return whole

    @override
    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        self._layout.check(tensors, what)
        for name in self._dims:
            yield name, self._part(name, tensors[name])

    @override
    def reduce_gradient(self, gradient: Tensor) -> None:
        """The backward pass has done so."""

    @override
    def unreduce_gradient(self, gradient: Tensor) -> None:
        """As above."""

    @override
    def grad_norm(self, gradient: Tensor) -> float:
        square = norm_of(gradient).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    @property
    def _head(self) -> nn.Module:
        head: nn.Module = self._model.get_output_embeddings()
        return head

    def _part(self, name: str, whole: Tensor) -> Tensor:
        return whole.chunk(self._ranks, self._dims[name])[self._rank]

    def _part_shape(self, name: str, whole: Tensor) -> tuple[int, ...]:
        dim = self._dims[name]
        return (*whole.shape[:dim], whole.shape[dim] // self._ranks, *whole.shape[dim + 1 :])

    def _shard(
        self, mesh: DeviceMesh, dtype: torch.dtype, counts: RouterCounts, *, recompute: bool
    ) -> None:
        """Shard the model without weights, then assign ours, with their gradients."""
        model = self._model
        trunk, _ = trunk_and_head(model)
        # Calls of the whole model gather what is not of a layer. They are about the trunk alone.
        model.forward = trunk.forward
        layers = [layer for _, layer in layers_of(trunk)]
        for experts in find_experts(model):
            module = model.get_submodule(experts.name)
            guard_gradients(module)
            counts.watch(module)
        if recompute:
            for layer in layers:
                _recompute_in_backward(layer)
        names = {weight: name for name, weight in model.named_parameters()}
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in (*layers, model):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=precision,
                shard_placement_fn=lambda weight: Shard(self._dims[names[weight]]),
            )
        for module in (*layers, model):
            divided = cast("FSDPModule", module)
            # Sums, not means; and added up by gloo too, which knows no factors.
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(enable=True)
            # An expert may have seen no token at one rank, and some at another.
            divided.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        model.load_state_dict(self._divided(mesh), assign=True)

    def _divided(self, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
        """Return our weights as torch shards them, by all of their names."""
        divided = {}
        for name, tensor in self.trainable.tensors.items():
            placed = [Shard(self._dims[name])]
            weight = nn.Parameter(DTensor.from_local(tensor.detach(), mesh, placed))
            weight.grad = DTensor.from_local(gradient_of(tensor), mesh, placed)
            divided[name] = weight
        first_names = {weight: name for name, weight in self._model.named_parameters()}
        every_name = self._model.named_parameters(remove_duplicate=False)
        return {name: divided[first_names[weight]] for name, weight in every_name}


def _divided_dim(name: str, weight: Tensor, ranks: int) -> int:
    for dim, size in enumerate(weight.shape):
        if size % ranks == 0:
            return dim
    raise InvalidRequest(
        f"lora_config: full fine-tuning at {ranks} ranks divides each weight by as many, and no"
        f" dimension of {name} {list(weight.shape)} can be; give a rank of LoRA"
    )


def _recompute_in_backward(layer: nn.Module) -> None:
    """Have a layer keep only its inputs, and recompute the rest in the backward pass."""
    forward = layer.forward

    def recomputable(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    # Assigned to the instance, so that the layer stays what it is, names and all.
    layer.forward = recomputable
