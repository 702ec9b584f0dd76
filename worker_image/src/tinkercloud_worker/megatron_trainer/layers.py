"""Layers made of megatron-core's own modules and one attention, whatever the device.

They can be computed again in the backward pass. megatron-core has that too, but saves the states of
CUDA's generators for it; nothing is drawn here.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tinkercloud_worker.megatron_trainer import deepseek
from tinkercloud_worker.megatron_trainer.attention import CausalAttention

_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}
"""Transformer Engine's layers hold their norms, which is what mbridge expects; these have them
beside."""


UNFUSED: Mapping[str, object] = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""Of a TransformerConfig: kernels that exist for GPUs only, and there with other packages only, are
off."""


def use_local_layers(bridge: Any, finish: Callable[[ModuleSpec], None]) -> None:  # noqa: ANN401 - mbridge has no types
    """Make a bridge build such layers, and load their weights.

    Args:
        bridge: of mbridge.
        finish: makes a layer's specification what this device wants.
    """

    def specification(_stage: int | None = None) -> TransformerBlockSubmodules:
        config = bridge.config
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
        # Layers that are built alike have one.
        for layer in {id(layer): layer for layer in block.layer_specs}.values():
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
            if config.multi_latent_attention:
                deepseek.use_latent_attention(layer, bridge.hf_config)
            finish(layer)
        block.layer_norm = block.layer_specs[0].submodules.input_layernorm
        return block

    bridge._OTHER_MAPPING = bridge._OTHER_MAPPING | _NORMS
    bridge._MLP_MAPPING = bridge._MLP_MAPPING | _NORMS
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = specification


class RepeatableLayers:
    """Layers that may keep their inputs only, and be computed again in the backward pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.repeat = False
        """Whether layers of the forward passes from here on will be."""
        for layer in layers:
            # Assigned to the instance, so that the layer stays what it is, names and all.
            layer.forward = partial(self._forward, layer, layer.forward)

    def _forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        *args: object,
        **kwargs: object,
    ) -> Any:  # noqa: ANN401 - as the layer's
        if not self.repeat:
            return forward(*args, **kwargs)
        # Those of a model that is trained whole are in their place in the forward pass only.
        weights: dict[str, Tensor] = dict(layer.named_parameters())

        def compute() -> Any:  # noqa: ANN401 - as the layer's
            self.repeat, before = False, self.repeat
            try:
                return functional_call(layer, weights, args, kwargs)
            finally:
                self.repeat = before

        return checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
