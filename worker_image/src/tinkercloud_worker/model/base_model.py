"""A frozen Hugging Face causal LM that can run with many sets of weights.

One copy of the base weights serves every model and every sampler. Each pass receives
`WeightSegment`s that assign weights to its positions: positions of an adapter get its LoRA delta in
each adapted linear layer; the weights of a fully fine-tuned model, rounded to the base's dtype,
replace the base's for the entire pass. The class is independent of losses, gradients, sampling and
requests.

Shape legend: B rows of a batch, T positions, D hidden size, R concatenated positions, V vocabulary.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.device.packed_attention import (
    PackedSequences,
    mask_kinds,
    use_own_attention,
    use_packed_attention,
)
from tinkercloud_worker.lora.segments import WeightSegment
from tinkercloud_worker.model import fused_kernels
from tinkercloud_worker.model.adapted_layers import AdaptedLayers, replaced_weights
from tinkercloud_worker.model.architecture import (
    backbone_and_lm_head,
    blank_model,
    logits_cap,
    logits_factor,
    max_context_length,
    name_of,
    rotary_switch,
    round_behind_embedding,
    targets_of,
)
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.model.image_passes import ImagePasses
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.model.loading import load_pretrained
from tinkercloud_worker.model.router_counts import RouterCounts
from tinkercloud_worker.model.self_check import check_logits, keeps_sequences_apart
from tinkercloud_worker.vision.spans import Images, ImageSpan

log = logging.getLogger(__name__)


class TorchBaseModel:
    """The shared base model. Not thread-safe: only one pass runs at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model: replace its forward functions and take out its towers.

        Args:
            model: any Hugging Face causal LM, or a vision-language model.

        Raises:
            UnsupportedModelError: this engine does not compute the architecture correctly.
        """
        accelerator.use_full_float32()
        self.images = ImagePasses(model)
        """Inserts the images of sequences."""
        self._model = _frozen(model)
        self.fingerprint: str | None = None
        """Fingerprint of the folder that the model was loaded from; None if there is none."""
        self.dtype: torch.dtype = model.dtype
        """The dtype of base weights and hidden states."""
        self._backbone, self._lm_head = backbone_and_lm_head(model)
        self._backbone_name = name_of(model, self._backbone)
        self._lm_head_name = name_of(model, self._lm_head)
        self.targets = targets_of(model, self._backbone_name, self._lm_head_name)
        self.router_counts = RouterCounts()
        """Counts the tokens routed to experts in a pass."""
        self._layers = AdaptedLayers(model, round_behind_embedding(model))
        self.unadaptable_experts = self._layers.adapt_all(self.targets, self.router_counts)
        """The class of experts that can't be adapted, if the model has any."""
        layers = layers_of(self._backbone)
        self._layer_prefixes = tuple(f"{name}." for name, _ in layers)
        for name, layer in layers:
            self._layers.make_recomputable(f"{self._backbone_name}.{name}.", layer)
        self._head_target = next(t for t in self.targets if t.group == "unembed")
        bias = getattr(self._lm_head, "bias", None)
        self.frozen_lm_head = FrozenLinear(self._lm_head_weight(), bias)
        """The LM head of the base."""
        self._mask_kinds = mask_kinds(model.config)
        self._logits_factor = logits_factor(model.config)
        self.logits_cap = logits_cap(model.config)
        self.rotary_switch = rotary_switch(model.config)
        """Length above which the rotary positions of a sequence change, if there is one."""
        # All sequences of a pass get the rotary positions of the longest one.
        self.takes_packs = self.rotary_switch is None and use_packed_attention(model)
        """Whether `hidden_of` accepts more than one sequence."""
        check_logits(self, model)
        if self.takes_packs and not keeps_sequences_apart(self):
            self.takes_packs = False
            use_own_attention(model)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
    ) -> "TorchBaseModel":
        """Load a model from a local folder in Hugging Face layout.

        Args:
            path: the folder.
            dtype: the dtype of its weights in memory.
            device: the device to compute on, as torch names it.

        Raises:
            UnsupportedModelError: this engine does not compute the architecture correctly, or the
                files do not match the configuration.
        """
        log.info("loading", extra={"progress": "reading and checking the weights"})
        model = load_pretrained(path, dtype)
        log.info("loading", extra={"progress": "comparing its results with those of transformers"})
        nn.Module.to(model, torch.device(device))
        base = cls(model)
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
        """Rows of the LM head."""
        return int(self.frozen_lm_head.weight.shape[0])

    @property
    def max_context_length(self) -> int:
        """Maximum context length of the model's configuration, in tokens."""
        return max_context_length(self.config)

    def named_weights(self) -> dict[str, Tensor]:
        """Return all weights by name; tied weights appear once, under their first name."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def first_layer_of(self, names: Iterable[str]) -> int:
        """Return the first layer that has one of these weights, from 0; if none has, their number.

        Args:
            names: names of weights of the base or of adapters.
        """
        named = tuple(names)
        layers = [f"{self._backbone_name}.{prefix}" for prefix in self._layer_prefixes]
        found = (
            number
            for number, prefix in enumerate(layers)
            if any(name.startswith(prefix) for name in named)
        )
        return next(found, len(layers))

    def without_weights(self) -> PreTrainedModel:
        """Return a new float32 model of this architecture, with weights on the meta device."""
        model = blank_model(self._model.config)
        for name, buffer in self._model.named_buffers():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_buffer(leaf, buffer, persistent=False)
        return model

    def hidden(
        self,
        input_ids_BT: Tensor,
        segments: Sequence[WeightSegment],
        *,
        position_ids_BT: Tensor | None = None,
        attention_mask: object = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the final hidden states [B, T, D], ready for the LM head.

        Without a mask, attention is causal, which is sufficient for right-padded rows.

        Args:
            input_ids_BT: int64 token ids.
            segments: the weights of each position. The weights of a full model must cover all
                positions.
            position_ids_BT: absolute positions; None means 0, 1, ... T - 1.
            attention_mask: a mask accepted by the Hugging Face model; None means causal.
            cache: keys and values of earlier positions, to which new ones are appended.
        """
        arguments = {
            "input_ids": input_ids_BT,
            "position_ids": position_ids_BT,
            "attention_mask": attention_mask,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        return self._run(arguments, segments, recompute=False)

    def hidden_of(
        self,
        sequences: PackedSequences,
        segments: Sequence[WeightSegment],
        *,
        cache: Cache | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Return the final hidden states [R, D] of sequences that do not attend to each other.

        Args:
            sequences: one sequence, or any number if `takes_packs`.
            segments: the weights of each position. The weights of a full model must cover all
                positions.
            cache: an empty cache that receives the keys and values of all positions.
            recompute: whether to use activation checkpointing: layers keep only their inputs, and
                are recomputed in the backward pass.
        """
        arguments = sequences.arguments(self._mask_kinds)
        arguments |= {"past_key_values": cache, "use_cache": cache is not None}
        return self._run(arguments, segments, sequences.spans, recompute=recompute)[0]

    def hidden_of_rest(
        self,
        ids_R: Tensor,
        start: int,
        images: Images,
        segments: Sequence[WeightSegment],
        cache: Cache,
    ) -> Tensor:
        """Return the final hidden states [R, D] of the next part of a prompt with images.

        Args:
            ids_R: int64 token ids of the part, which contains all tokens of an image or none.
            start: position of its first token.
            images: all images of the prompt.
            segments: the weights of each position.
            cache: keys and values of earlier positions, to which new ones are appended.
        """
        positions_R = torch.arange(start, start + len(ids_R), device=ids_R.device)
        arguments = {
            "input_ids": ids_R[None],
            "position_ids": positions_R[None],
            "past_key_values": cache,
            "use_cache": True,
        }
        spans = [ImageSpan(start, start + len(ids_R), images)]
        return self._run(arguments, segments, spans, recompute=False)[0]

    def _run(
        self,
        arguments: dict[str, Any],
        segments: Sequence[WeightSegment],
        spans: Sequence[ImageSpan] = (),
        *,
        recompute: bool,
    ) -> Tensor:
        # Recomputed layers round their own weights each time.
        own, prefix = self._layer_prefixes if recompute else (), f"{self._backbone_name}."
        replaced = self._layers.rounded(replaced_weights(segments), prefix, own)
        with (
            self._layers.using(segments, recompute=recompute),
            self.images.inserted(arguments, spans) as inputs,
        ):
            output = (
                torch.func.functional_call(self._backbone, replaced, (), inputs)
                if replaced
                else self._backbone(**inputs)
            )
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD if self._logits_factor == 1 else hidden_BTD * self._logits_factor

    def logits(self, hidden_RD: Tensor, segments: Sequence[WeightSegment]) -> Tensor:
        """Return float32 logits [R, V] of hidden states; `segments` cover the R positions."""
        with torch.no_grad():
            lm_head = self.lm_head(replaced_weights(segments))
            layer = LMHead(lm_head, self.lm_head_adapters(segments), cap=self.logits_cap)
            return layer.logits(hidden_RD)

    def lm_head(self, replaced: Mapping[str, Tensor] | None) -> FrozenLinear:
        """Return the LM head: the base's, or its replacement."""
        if replaced is None:
            return self.frozen_lm_head
        weight, bias = self.lm_head_of(replaced)
        rounded_bias = None if bias is None else bias.to(self.dtype)
        return FrozenLinear(weight.to(self.dtype), rounded_bias)

    def lm_head_of(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the weight [V, D] and bias [V] (or None) of a full model's LM head."""
        name = f"{self._lm_head_name}.weight"
        weight = tensors[name if name in tensors else self._tied_name]
        return weight, tensors.get(f"{self._lm_head_name}.bias")

    def _lm_head_weight(self) -> Tensor:
        weight = self._lm_head.weight
        assert isinstance(weight, Tensor)  # noqa: S101 - true of every linear LM head
        return weight

    def lm_head_adapters(
        self, segments: Sequence[WeightSegment]
    ) -> list[tuple[slice, Tensor, Tensor, float]]:
        """Return rows, A, B and scale of each adapter that adapts the LM head."""
        return [
            (segment.rows, segment.weights.tensors[a], segment.weights.tensors[b], scale)
            for segment in segments
            if segment.weights is not None
            and isinstance(scale := segment.weights.lora_scale, float)
            and (a := self._head_target.a_name) in segment.weights.tensors
            and (b := self._head_target.b_name)
        ]

    @property
    def _tied_name(self) -> str:
        lm_head_weight = self._lm_head_weight()
        names = (
            name for name, weight in self._model.named_parameters() if weight is lm_head_weight
        )
        return str(next(names))


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with frozen weights and faster kernels."""
    fused_kernels.fuse(model)
    model.eval().requires_grad_(requires_grad=False)
    return model


def layers_of(backbone: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated layers of a backbone with their names: its longest module list."""
    lists = [
        (n, module) for n, module in backbone.named_children() if isinstance(module, nn.ModuleList)
    ]
    name, layers = max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    return [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]
