"""The layers of a base model, which compute with the weights of the running pass.

The forward functions of modules are replaced in the instances, so that modules keep their classes
and parameter names.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.frozen_linear import FrozenLinear, has_kernels
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.deltas import DeltaSpans, adapted_product, add_deltas
from tinkercloud_worker.lora.experts import (
    FusedExperts,
    find_experts,
    guard_gradients,
    unadaptable_experts,
    with_deltas,
)
from tinkercloud_worker.lora.segments import WeightSegment, delta_of, expert_deltas
from tinkercloud_worker.lora.stacks import LoraProducts
from tinkercloud_worker.model.router_counts import RouterCounts


class AdaptedLayers:
    """Replaces layers, and knows the weights that they use now. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, embedding_weight: str | None) -> None:
        """Replace nothing yet.

        Args:
            model: the model.
            embedding_weight: name of the weight whose output is rounded after the lookup.
        """
        self._model = model
        self._dtype: torch.dtype = model.dtype
        self._embedding_weight = embedding_weight
        self._segments: Sequence[WeightSegment] = ()
        self._products = LoraProducts(())
        self._recomputes = False

    @contextmanager
    def using(self, segments: Sequence[WeightSegment], *, recompute: bool) -> Iterator[None]:
        """Compute with these weights until the context ends.

        Args:
            segments: the weights of each position.
            recompute: whether layers keep only their inputs for the backward pass.
        """
        self._products = LoraProducts(segments)
        self._segments, self._recomputes = segments, recompute
        try:
            yield
        finally:
            # The graph has what a backward pass needs.
            self._products = LoraProducts(())
            self._segments, self._recomputes = (), False

    def adapt_all(self, targets: Sequence[Target], router_counts: RouterCounts) -> str | None:
        """Prepare layers for adapters; return the class of experts that can't be adapted.

        Args:
            targets: the layers that adapters may have.
            router_counts: counts the tokens that each module with experts routes.
        """
        model = self._model
        for target in targets:
            if target.group != "unembed" and not target.experts:
                self._adapt(target, model.get_submodule(target.name))
        experts = find_experts(model)
        for each in experts:
            module = model.get_submodule(each.name)
            guard_gradients(module)
            self._adapt_experts(each, module)
            router_counts.watch(module)
        return unadaptable_experts(experts, model)

    def _adapt(self, target: Target, module: nn.Module) -> None:
        """Make a linear layer add the LoRA deltas of a pass."""
        if self._dtype == torch.float32:
            if isinstance(module, nn.Linear) and has_kernels(module.weight):
                self._freeze(target, module)
            else:
                module.register_forward_hook(partial(self._add_deltas, target))
            return
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            if not self._products.adapts(target):
                result: Tensor = plain(x)
                return result
            weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
            if not isinstance(module, nn.Linear):
                weight = weight.T
            return self._products.linear(target, x, weight, bias)

        # Assigned to the instance, so that the module keeps its class and parameter names.
        module.forward = forward

    def _freeze(self, target: Target, module: nn.Linear) -> None:
        """Make a linear layer use oneDNN and add deltas, unless another weight replaces its own."""
        frozen = FrozenLinear(module.weight, module.bias)

        def forward(x: Tensor) -> Tensor:
            if module.weight is not frozen.weight:
                # Only the weights of a full model replace it, which have no deltas.
                return nn.functional.linear(x, module.weight, module.bias)
            parts = self._parts(target)
            return adapted_product(x, frozen, parts) if any(t for _, t in parts) else frozen(x)

        # Assigned to the instance, so that the module keeps its class and parameter names.
        module.forward = forward  # type: ignore[method-assign,assignment]

    def _adapt_experts(self, experts: FusedExperts, module: nn.Module) -> None:
        """Make the experts of a layer add the LoRA deltas of a pass."""
        plain = module.forward

        # transformers passes these parameters by name.
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            parts = [
                (segment.rows, expert_deltas(experts, segment.weights))
                for segment in self._segments
            ]
            adapted = any(deltas for _, deltas in parts)
            compute = with_deltas(module, plain, parts) if adapted else plain
            return compute(hidden_states, top_k_index, top_k_weights)

        # Assigned to the instance, so that the module keeps its class and parameter names.
        module.forward = forward

    def _add_deltas(
        self, target: Target, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Add LoRA deltas to a layer's output (a forward hook)."""
        parts = self._parts(target)
        return add_deltas(inputs[0], output, parts) if any(t for _, t in parts) else output

    def _parts(self, target: Target) -> DeltaSpans:
        return [(segment.rows, delta_of(target, segment.weights)) for segment in self._segments]

    def rounded(
        self, tensors: Mapping[str, Tensor] | None, prefix: str, others: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Return the weights that replace a module's own, rounded under autograd.

        The input embedding is not rounded here: its output is, after the lookup.

        Args:
            tensors: the weights of a full model; None for the base.
            prefix: the prefix of the module's weight names, stripped from the result.
            others: prefixes of names to leave out.
        """
        return {
            own: tensor if name == self._embedding_weight else tensor.to(self._dtype)
            for name, tensor in (tensors or {}).items()
            if name.startswith(prefix) and not (own := name.removeprefix(prefix)).startswith(others)
        }

    def make_recomputable(self, prefix: str, layer: nn.Module) -> None:
        """Let a layer be recomputed in the backward pass with the weights of the forward pass."""
        forward = layer.forward

        def recomputable(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
            if not self._recomputes:
                return forward(*args, **kwargs)
            segments, products = self._segments, self._products
            tensors = replaced_weights(segments)

            def compute(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
                before = self._segments, self._products, self._recomputes
                replaced = self.rounded(tensors, prefix)
                self._segments, self._products, self._recomputes = segments, products, False
                try:
                    return torch.func.functional_call(layer, replaced, args, kwargs)
                finally:
                    self._segments, self._products, self._recomputes = before

            return checkpoint(
                compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        # Assigned to the instance, so that the layer keeps its class and parameter names.
        layer.forward = recomputable


def replaced_weights(segments: Sequence[WeightSegment]) -> Mapping[str, Tensor] | None:
    """Return the weights that replace the base's for an entire pass; None if none do."""
    whole = [r.weights for r in segments if r.weights and r.weights.lora_scale is None]
    if not whole:
        return None
    if len(segments) != 1:
        raise ValueError("the weights of a full model must cover all rows of a pass")
    return whole[0].tensors
