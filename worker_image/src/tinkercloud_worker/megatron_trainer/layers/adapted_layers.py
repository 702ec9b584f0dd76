"""Transformer layers from megatron-core's own modules, with one attention for all devices.

The layers support activation checkpointing. megatron-core's own implementation also saves the
states of CUDA's random generators, which are not used here.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tinkercloud_worker.megatron_trainer.layers import deepseek
from tinkercloud_worker.megatron_trainer.layers.attention import CausalAttention
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism

_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}
"""Names of norms: mbridge expects Transformer Engine layers, which contain their norms; here norms
are separate modules."""


_UNFUSED: Mapping[str, object] = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""TransformerConfig settings that disable kernels which need a GPU and other packages."""


def settings(parallelism: Parallelism) -> Mapping[str, object]:
    """Return the TransformerConfig settings for these layers."""
    # Sequence parallelism: computations between tensor-parallel weights are split along the
    # sequence.
    return {**_UNFUSED, "sequence_parallel": parallelism.tensor > 1}


class Norm(nn.RMSNorm):
    """torch's norm. megatron-core's wrapper of it needlessly rejects sequence parallelism."""

    def __init__(
        self,
        config: TransformerConfig,  # noqa: ARG002 - how megatron-core makes norms
        hidden_size: int,
        eps: float,
    ) -> None:
        """Create a norm over the last dimension.

        Args:
            config: the configuration of the model.
            hidden_size: size of that dimension.
            eps: added to the mean square.
        """
        super().__init__(hidden_size, eps=eps)


def use_local_layers(bridge: Any) -> None:  # noqa: ANN401 - mbridge has no types
    """Configure a bridge to build these layers and load their weights."""

    def specification(_stage: int | None = None) -> TransformerBlockSubmodules:
        config = bridge.config
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
        # Identical layers share one specification.
        for layer in {id(layer): layer for layer in block.layer_specs}.values():
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
            if config.multi_latent_attention:
                deepseek.use_latent_attention(layer, bridge.hf_config)
            _use_norms(layer)
        block.layer_norm = Norm
        return block

    bridge._OTHER_MAPPING = bridge._OTHER_MAPPING | _NORMS
    bridge._MLP_MAPPING = bridge._MLP_MAPPING | _NORMS
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = specification


def _use_norms(layer: ModuleSpec) -> None:
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, Norm)


def use_gates_without_copies(module: nn.Module) -> None:
    """Make dense MLPs multiply gate and up projections without copying them.

    megatron-core first adds an offset of zero to the up projection, and saves that copy for the
    backward pass. Routed experts are computed elsewhere (`grouped_experts`); shared experts stay
    megatron-core's.
    """
    for mlp in module.modules():
        if type(mlp) is MLP:
            # Assigned to the instance, so that the module stays what it is, names and all.
            mlp.forward = partial(_gated, mlp)


def _gated(mlp: MLP, hidden_SBD: Tensor, **_: object) -> tuple[Tensor, None]:
    gate_up, _ = mlp.linear_fc1(hidden_SBD)
    gate, up = gate_up.chunk(2, -1)
    output, _ = mlp.linear_fc2(mlp.activation_func(gate) * up)
    return output, None


class RecomputedLayers:
    """Layers that can keep only their inputs and be recomputed in the backward pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.recompute = False
        """Whether layers of the following forward passes are recomputed."""
        for layer in layers:
            # Assigned to the instance, so that the layer keeps its class and parameter names.
            layer.forward = partial(self._forward, layer, layer.forward)

    def _forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        *args: object,
        **kwargs: object,
    ) -> Any:  # noqa: ANN401 - as the layer's
        if not self.recompute:
            return forward(*args, **kwargs)
        # The weights of a fully fine-tuned model replace the module's own only during the forward
        # pass.
        weights: dict[str, Tensor] = dict(layer.named_parameters())

        def compute() -> Any:  # noqa: ANN401 - as the layer's
            self.recompute, before = False, self.recompute
            try:
                return functional_call(layer, weights, args, kwargs)
            finally:
                self.recompute = before

        return checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
