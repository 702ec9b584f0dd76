"""Layers made of megatron-core's own modules and one attention, whatever the device."""

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from tinkercloud_worker.megatron_trainer.attention import CausalAttention

_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}
"""Transformer Engine's layers hold their norms, which is what mbridge expects; these have them
beside."""


def use_local_layers(bridge: Any, finish: Callable[[ModuleSpec], ModuleSpec]) -> None:  # noqa: ANN401 - mbridge has no types
    """Make a bridge build such layers, and load their weights.

    Args:
        bridge: of mbridge.
        finish: returns a layer's specification as this device wants it.
    """

    def specification(_stage: int | None = None) -> ModuleSpec:
        config = bridge.config
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
        spec.submodules.self_attention.submodules.core_attention = CausalAttention
        return finish(spec)

    bridge._OTHER_MAPPING = bridge._OTHER_MAPPING | _NORMS
    bridge._MLP_MAPPING = bridge._MLP_MAPPING | _NORMS
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = specification
