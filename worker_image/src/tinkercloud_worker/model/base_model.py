"""A frozen Hugging Face causal LM that can run with many sets of weights.

One copy of the base weights serves every model and every sampler. A pass is told which of its
positions run with which weights (`Route`): those of an adapter get its low-rank term added to each
adapted linear layer; a fully fine-tuned model's weights, rounded to the base's dtype, take the
place of the base's for the whole pass. The class knows nothing of losses, gradients, sampling or
requests.

Shape legend: B rows of a batch, T positions, D hidden size, R positions one after another, V
vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.device.packing import (
    PackedSequences,
    mask_kinds,
    use_own_attention,
    use_packed_attention,
)
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.experts import (
    FusedExperts,
    find_experts,
    guard_gradients,
    unadaptable_experts,
    with_terms,
)
from tinkercloud_worker.lora.linear import LowRankTerms, TermSpans, add_terms
from tinkercloud_worker.lora.segments import Route, expert_terms, term_of
from tinkercloud_worker.model import fused_kernels
from tinkercloud_worker.model.architecture import (
    blank_model,
    find_targets,
    keep_text,
    logits_factor,
    max_context_length,
    name_of,
    rotary_switch,
    round_behind_embedding,
    trunk_and_head,
)
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.model.lm_head import Unembedding
from tinkercloud_worker.model.loading import load_pretrained
from tinkercloud_worker.model.router_counts import RouterCounts
from tinkercloud_worker.model.self_check import check_logits, keeps_sequences_apart


class BaseModel:
    """The shared base. Not thread-safe: one pass at a time."""

    def __init__(self, model: PreTrainedModel, *, packed: bool = True) -> None:
        """Wrap a model, whose forward functions are replaced, and parts for images removed.

        Args:
            model: any Hugging Face causal LM, or a vision-language model.
            packed: whether to keep packed weights, which take memory (`frozen_linear`).

        Raises:
            UnsupportedModelError: its architecture is not one we compute correctly.
        """
        self._model = _frozen(model)
        self.fingerprint: str | None = None
        """Of the folder that the model was loaded from (`fingerprint`); None if of none."""
        self.dtype: torch.dtype = model.dtype
        """Of the base weights and of hidden states."""
        self._trunk, self._head = trunk_and_head(model)
        self._routes: Sequence[Route] = ()
        self._terms = LowRankTerms()
        self._trunk_name = name_of(model, self._trunk)
        self._head_name = name_of(model, self._head)
        self.targets = find_targets(model, self._trunk_name, self._head_name)
        self.router_counts = RouterCounts()
        """Counts what the experts of passes are sent."""
        self.unadaptable_experts = self._adapt_all(model, packed=packed)
        """The class of experts that can't be adapted, if the model has such."""
        self._recomputes = False
        layers = layers_of(self._trunk)
        self._layer_prefixes = tuple(f"{name}." for name, _ in layers)
        for name, layer in layers:
            self._make_recomputable(f"{self._trunk_name}.{name}.", layer)
        self._embedding_weight = round_behind_embedding(model)
        self._head_target = next(t for t in self.targets if t.group == "unembed")
        bias = getattr(self._head, "bias", None)
        self.frozen_head = FrozenLinear(self._head_weight(), bias, packed=packed)
        """The output embedding, as it is in the base."""
        self._mask_kinds = mask_kinds(model.config)
        self._logits_factor = logits_factor(model.config)
        self.rotary_switch = rotary_switch(model.config)
        """Length beyond which a sequence has other rotary positions, if there is one."""
        # A pass has the rotary positions of the longest sequence in it.
        self.takes_packs = self.rotary_switch is None and use_packed_attention(model)
        """Whether `hidden_of` may be given more than one sequence."""
        check_logits(self, model)
        if self.takes_packs and not keeps_sequences_apart(self):
            self.takes_packs = False
            use_own_attention(model)

    def _adapt_all(self, model: PreTrainedModel, *, packed: bool) -> str | None:
        """Prepare layers for adapters; return the class of experts that take none."""
        for target in self.targets:
            if target.group != "unembed" and not target.experts:
                self._adapt(target, model.get_submodule(target.name), packed=packed)
        experts = find_experts(model)
        for each in experts:
            module = model.get_submodule(each.name)
            guard_gradients(module)
            self._adapt_experts(each, module)
            self.router_counts.watch(module)
        return unadaptable_experts(experts, model)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype,
        *,
        packed: bool = True,
        device: str = "cpu",
    ) -> "BaseModel":
        """Load a model from a local folder in Hugging Face layout.

        Args:
            path: of the folder.
            dtype: that its weights are kept in.
            packed: whether memory may be spent on packed weights (`frozen_linear`).
            device: where it computes, as torch names it.

        Raises:
            UnsupportedModelError: its architecture is not one we compute correctly, or its files
                do not hold the model that its configuration describes.
        """
        model = load_pretrained(path, dtype)
        nn.Module.to(model, torch.device(device))
        base = cls(model, packed=packed)
        base.fingerprint = fingerprint_of(path)
        return base

    @property
    def config(self) -> Any:  # noqa: ANN401 - transformers' configurations have no common type
        """The Hugging Face configuration of the text model."""
        return self._model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Device of weights, inputs and outputs."""
        device: torch.device = self._model.device
        return device

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self.frozen_head.weight.shape[0])

    @property
    def max_context_length(self) -> int:
        """Longest sequence the model's configuration allows, in tokens."""
        return max_context_length(self.config)

    def named_weights(self) -> dict[str, Tensor]:
        """Return all weights by name; tied ones once, under the first of their names."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def without_weights(self) -> PreTrainedModel:
        """Return another model of this architecture, float32, whose weights hold no memory yet."""
        model = blank_model(self._model.config)
        for name, buffer in self._model.named_buffers():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_buffer(leaf, buffer, persistent=False)
        return model

    def hidden(
        self,
        input_ids_BT: Tensor,
        routes: Sequence[Route],
        *,
        position_ids_BT: Tensor | None = None,
        attention_mask: object = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the final hidden states [B, T, D], as the output layer takes them.

        Without a mask attention is causal, which is all that right-padded rows need.

        Args:
            input_ids_BT: int64 token ids.
            routes: which positions run with which weights. Whole-model weights must cover all.
            position_ids_BT: absolute positions; None means 0, 1, ... T - 1.
            attention_mask: in a form the Hugging Face model takes; None means causal.
            cache: keys and values of earlier positions; the new ones are added.
        """
        arguments = {
            "input_ids": input_ids_BT,
            "position_ids": position_ids_BT,
            "attention_mask": attention_mask,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        return self._run(arguments, routes, recompute=False)

    def hidden_of(
        self,
        sequences: PackedSequences,
        routes: Sequence[Route],
        *,
        cache: Cache | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Return the final hidden states [R, D] of sequences that do not attend to each other.

        Args:
            sequences: one, or (`takes_packs`) any number.
            routes: which positions run with which weights. Whole-model weights must cover all.
            cache: takes keys and values of all positions; it has none before.
            recompute: whether layers keep only their inputs, and are recomputed in the backward
                pass.
        """
        arguments = sequences.arguments(self._mask_kinds)
        arguments |= {"past_key_values": cache, "use_cache": cache is not None}
        return self._run(arguments, routes, recompute=recompute)[0]

    def _run(
        self, arguments: dict[str, Any], routes: Sequence[Route], *, recompute: bool
    ) -> Tensor:
        # Layers that are computed again round their own weights, each time.
        own = self._layer_prefixes if recompute else ()
        replaced = self._rounded(self._replaced_weights(routes), f"{self._trunk_name}.", own)
        self._terms = LowRankTerms()
        self._routes, self._recomputes = routes, recompute
        try:
            output = (
                torch.func.functional_call(self._trunk, replaced, (), arguments)
                if replaced
                else self._trunk(**arguments)
            )
        finally:
            self._routes, self._recomputes = (), False
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD if self._logits_factor == 1 else hidden_BTD * self._logits_factor

    def logits(self, hidden_RD: Tensor, routes: Sequence[Route]) -> Tensor:
        """Return float32 logits [R, V] of hidden states; `routes` are of the R positions."""
        with torch.no_grad():
            head = self.head(self._replaced_weights(routes))
            return Unembedding(head, self.head_adapters(routes)).logits(hidden_RD)

    def head(self, replaced: Mapping[str, Tensor] | None) -> FrozenLinear:
        """Return the output embedding: the base's, or the one that replaces it."""
        if replaced is None:
            return self.frozen_head
        weight, bias = self.head_of(replaced)
        rounded_bias = None if bias is None else bias.to(self.dtype)
        return FrozenLinear(weight.to(self.dtype), rounded_bias, packed=False)

    def head_of(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return weight [V, D] and bias [V], if there is one, of a whole model's output layer."""
        name = f"{self._head_name}.weight"
        weight = tensors[name if name in tensors else self._tied_name]
        return weight, tensors.get(f"{self._head_name}.bias")

    def _head_weight(self) -> Tensor:
        weight = self._head.weight
        assert isinstance(weight, Tensor)  # noqa: S101 - true of every linear output embedding
        return weight

    def head_adapters(self, routes: Sequence[Route]) -> list[tuple[slice, Tensor, Tensor, float]]:
        """Return rows, A, B and scale of each adapter that adapts the output embedding."""
        return [
            (route.rows, route.weights.tensors[a], route.weights.tensors[b], scale)
            for route in routes
            if route.weights is not None
            and isinstance(scale := route.weights.lora_scale, float)
            and (a := self._head_target.a_name) in route.weights.tensors
            and (b := self._head_target.b_name)
        ]

    @property
    def _tied_name(self) -> str:
        head_weight = self._head_weight()
        names = (name for name, weight in self._model.named_parameters() if weight is head_weight)
        return str(next(names))

    def _replaced_weights(self, routes: Sequence[Route]) -> Mapping[str, Tensor] | None:
        whole = [r.weights for r in routes if r.weights and r.weights.lora_scale is None]
        if not whole:
            return None
        if len(routes) != 1:
            raise ValueError("whole-model weights must cover all rows of a pass")
        return whole[0].tensors

    def _rounded(
        self, tensors: Mapping[str, Tensor] | None, prefix: str, others: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Return the weights that replace those of a module, rounded under autograd.

        The input embedding is not rounded: what is looked up in it is.

        Args:
            tensors: of the whole model; None if it is the base.
            prefix: of the names of the module's weights, which are returned without.
            others: prefixes of names in it that are left out.
        """
        return {
            own: tensor if name == self._embedding_weight else tensor.to(self.dtype)
            for name, tensor in (tensors or {}).items()
            if name.startswith(prefix) and not (own := name.removeprefix(prefix)).startswith(others)
        }

    def _adapt(self, target: Target, module: nn.Module, *, packed: bool) -> None:
        """Make a linear layer add the terms of the adapters that a pass runs with."""
        if self.dtype == torch.float32:
            if packed and isinstance(module, nn.Linear):
                _freeze(module)
            module.register_forward_hook(partial(self._add_terms, target))
            return
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            parts = self._parts(target)
            if not any(term for _, term in parts):
                result: Tensor = plain(x)
                return result
            weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
            if not isinstance(module, nn.Linear):
                weight = weight.T
            return self._terms.linear(x, weight, bias, parts)

        # Assigned to the instance, so that the module stays what it is, names and all.
        module.forward = forward

    def _adapt_experts(self, experts: FusedExperts, module: nn.Module) -> None:
        """Make the experts of a layer add the terms of the adapters that a pass runs with."""
        plain = module.forward

        # The names are transformers'.
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            parts = [(route.rows, expert_terms(experts, route.weights)) for route in self._routes]
            adapted = any(terms for _, terms in parts)
            compute = with_terms(module, plain, parts) if adapted else plain
            return compute(hidden_states, top_k_index, top_k_weights)

        # Assigned to the instance, so that the module stays what it is, names and all.
        module.forward = forward

    def _add_terms(
        self, target: Target, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Add the terms to a layer's output (a forward hook)."""
        parts = self._parts(target)
        return add_terms(inputs[0], output, parts) if any(t for _, t in parts) else output

    def _parts(self, target: Target) -> TermSpans:
        return [(route.rows, term_of(target, route.weights)) for route in self._routes]

    def _make_recomputable(self, prefix: str, layer: nn.Module) -> None:
        """Let a layer be recomputed in the backward pass, with the weights of the forward pass."""
        forward = layer.forward

        def recomputable(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
            if not self._recomputes:
                return forward(*args, **kwargs)
            routes = self._routes
            tensors = self._replaced_weights(routes)

            def compute(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the layer's
                before = self._routes, self._recomputes
                replaced = self._rounded(tensors, prefix)
                self._routes, self._recomputes = routes, False
                try:
                    return torch.func.functional_call(layer, replaced, args, kwargs)
                finally:
                    self._routes, self._recomputes = before

            return checkpoint(
                compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        # Assigned to the instance, so that the layer stays what it is, names and all.
        layer.forward = recomputable


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text of a model, with faster kernels, for passes that do not train it."""
    keep_text(model)
    fused_kernels.fuse(model)
    model.eval().requires_grad_(requires_grad=False)
    return model


def layers_of(trunk: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated layers of a trunk with their names: its longest list of modules."""
    lists = [
        (n, module) for n, module in trunk.named_children() if isinstance(module, nn.ModuleList)
    ]
    name, layers = max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    return [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]


def _freeze(module: nn.Linear) -> None:
    """Make a linear layer compute from its packed weight, unless another weight replaces it."""
    frozen = FrozenLinear(module.weight, module.bias, packed=True)

    def forward(x: Tensor) -> Tensor:
        if module.weight is frozen.weight:
            return frozen(x)
        return nn.functional.linear(x, module.weight, module.bias)

    # Assigned to the instance, so that the module stays what it is, names and all.
    module.forward = forward  # type: ignore[method-assign,assignment]
