"""A fully fine-tuned model, sharded over ranks layer by layer (FSDP2).

Each rank stores a shard of every weight with its gradient and moments, in float32: a slice along
the first dimension whose size is divisible by the number of ranks. torch rounds the weights of a
layer to the base's dtype and gathers them while the layer computes, forward and backward. It
reduces gradients in float32 and leaves each rank its shard. Weights outside the layers (embeddings,
the final norm) stay gathered from the forward pass to the end of the backward pass, because the LM
head is computed between the two.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.device.packed_attention import PackedSequences, mask_kinds
from tinkercloud_worker.engine.ranks import Sharding
from tinkercloud_worker.engine.tensor_slices import Piece, full_slice
from tinkercloud_worker.lora.experts import find_experts, guard_gradients
from tinkercloud_worker.lora.parameters import (
    TensorLayout,
    TensorSpec,
    Trainable,
    gradient_of,
    norm_of,
)
from tinkercloud_worker.model.architecture import (
    backbone_and_lm_head,
    logits_cap,
    logits_factor,
)
from tinkercloud_worker.model.base_model import TorchBaseModel, layers_of
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.model.router_counts import RouterCounts


class ShardedModel(Sharding):
    """See `engine.ranks.Sharding`. All ranks of the mesh run the same passes in the same order."""

    is_whole = False

    def __init__(self, base: TorchBaseModel, mesh: DeviceMesh, *, recompute: bool) -> None:
        """Initialize from the base's weights, gathering one weight at a time.

        Args:
            base: the base model, sharded over the mesh or replicated.
            mesh: a one-dimensional mesh of all ranks.
            recompute: whether to use activation checkpointing: layers keep only their inputs.

        Raises:
            InvalidRequest: a weight has no dimension divisible by the number of ranks.
        """
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        weights = base.named_weights()
        self._layout = TensorLayout.of(weights)
        self._dims = {name: _divided_dim(name, w, self._ranks) for name, w in weights.items()}
        self.shared: Set[str] = self._dims.keys()
        self.trainable = Trainable(
            TensorLayout(
                TensorSpec(name, self._part_shape(name, w)) for name, w in weights.items()
            ),
            base.device,
        )
        views = self.trainable.layout.views(self.trainable.flat.detach())
        for name, weight in weights.items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            views[name].copy_(self._part(name, whole))
        self._model = base.without_weights()
        self._images = base.images
        self._images.insert_into(self._model)
        self._lm_head_gradients: dict[str, Tensor] = {}
        """Gradients from the current pass, until its backward pass has run."""
        self._shard(mesh, base.dtype, base.router_counts, recompute=recompute)

    def hidden(self, sequences: PackedSequences) -> Tensor:
        """Return the final hidden states [R, D].

        If gradients are recorded, every rank must run the backward pass next.
        """
        arguments = sequences.arguments(mask_kinds(self._model.config))
        with self._images.inserted(arguments, sequences.spans) as inputs:
            hidden_RD: Tensor = self._model(**inputs).last_hidden_state[0]
        factor = logits_factor(self._model.config)
        if factor != 1:
            hidden_RD = hidden_RD * factor
        if torch.is_grad_enabled():
            self._lm_head_gradients = {
                name: torch.zeros_like(weight, dtype=torch.float32)
                for name, weight in self._lm_head.named_parameters()
            }
        return hidden_RD

    def lm_head(self) -> LMHead:
        """Return the LM head, which is available between `hidden` and `backward`."""
        weight, bias = cast("Tensor", self._lm_head.weight), getattr(self._lm_head, "bias", None)
        of_pass = self._lm_head_gradients
        gradients = (of_pass["weight"], of_pass.get("bias")) if of_pass else None
        cap = logits_cap(self._model.config)
        return LMHead(FrozenLinear(weight, bias), (), gradients, cap)

    def backward(self, hidden_RD: Tensor, gradient_RD: Tensor) -> None:
        """Run the backbone's backward pass, and reduce the LM head's gradient over ranks."""
        for name, weight in self._lm_head.named_parameters():
            weight.grad = self._lm_head_gradients[name].to(weight.dtype)
        self._lm_head_gradients = {}
        hidden_RD.backward(gradient_RD)

    def release(self) -> None:
        """Free the weights gathered by the last pass, unless its backward pass has done so."""
        cast("FSDPModule", self._model).reshard()

    @override
    def pieces(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Piece]:
        shapes = self._layout.shapes()
        for name, tensor in tensors.items():
            full = full_slice(name, shapes[name])
            block = full.chunk(self._rank, self._ranks, self._dims[name])
            yield Piece(block, shapes[name], tensor.cpu().to(dtype))

    @override
    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        self._layout.check(tensors, what)
        for name in self._dims:
            yield name, self._part(name, tensors[name])

    @override
    def reduce_gradient(self, gradient: Tensor) -> None:
        """Do nothing: the backward pass has already reduced the gradient."""

    @override
    def unreduce_gradient(self, gradient: Tensor) -> None:
        """Do nothing: the gradient is already a shard."""

    @override
    def grad_norm(self, gradient: Tensor) -> float:
        square = norm_of(gradient).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    @property
    def _lm_head(self) -> nn.Module:
        lm_head: nn.Module = self._model.get_output_embeddings()
        return lm_head

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
        backbone, _ = backbone_and_lm_head(model)
        # Calling the full model gathers the weights outside the layers, but should run the backbone
        # only.
        model.forward = backbone.forward
        layers = [layer for _, layer in layers_of(backbone)]
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
            # Sums, not means: gloo, which is used as well, does not support division.
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(enable=True)
            # An expert may receive no tokens on one rank and some on another.
            divided.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        model.load_state_dict(self._divided(mesh), assign=True)

    def _divided(self, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
        """Return our weights as torch shards them, under all of their names."""
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
        f"lora_config: full fine-tuning on {ranks} ranks needs a dimension divisible by {ranks} in"
        f" every weight, but {name} has shape {list(weight.shape)}; set a LoRA rank instead"
    )


def _recompute_in_backward(layer: nn.Module) -> None:
    """Enable activation checkpointing for a layer: keep its inputs, recompute the rest."""
    forward = layer.forward

    def recomputable(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    # Assigned to the instance, so that the layer keeps its class and parameter names.
    layer.forward = recomputable
