"""DeepSeek models (V2, V3 and similar ones): latent attention and shared experts.

mbridge provides the weight names and megatron-core the linear layers. The rest computes as in
Hugging Face: rotary frequencies, selection of experts, scale of attention scores. Multi-token
prediction (MTP) layers are not built, and their weights are not read.

Shape legend: S positions on this rank, H heads on this rank, R rotary elements of a head; N tokens,
E experts of a layer, G expert groups.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from mbridge.core import register_model
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from tinkercloud_worker.megatron_trainer.layers import rotary
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.layers.sequence import DividedSequences
from tinkercloud_worker.model.architecture import UnsupportedModelError

# mbridge assumes that Transformer Engine is installed if megatron-core defines its layer names.
vars(multi_latent_attention)["HAVE_TE"] = HAVE_TE

FAMILIES = frozenset({"deepseek_v2", "deepseek_v3"})
_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside attention: Hugging Face uses this value regardless of
`rms_norm_eps`."""


@register_model(sorted(FAMILIES))
class DeepseekBridge(DeepseekV3Bridge):  # type: ignore[misc]
    """mbridge's bridge for transformers 5 configurations, with separate norms and without MTP."""

    _ATTENTION_MAPPING = DeepseekV3Bridge._ATTENTION_MAPPING | {
        "self_attention.q_layernorm.weight": [
            "model.layers.{layer_number}.self_attn.q_a_layernorm.weight"
        ],
        "self_attention.kv_layernorm.weight": [
            "model.layers.{layer_number}.self_attn.kv_a_layernorm.weight"
        ],
    }

    def _build_config(self) -> MLATransformerConfig:
        config = self.hf_config
        rope = config.rope_parameters
        stretched = rope["rope_type"] != "default"
        dense = min(config.first_k_dense_replace, config.num_hidden_layers)
        sigmoid = config.model_type == "deepseek_v3"
        return self._build_base_config(
            qk_layernorm=True,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_head_dim=config.qk_nope_head_dim,
            qk_pos_emb_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            # megatron-core uses these only for the scale of scores; rotary positions are ours.
            rope_type="rope",
            rotary_base=rope["rope_theta"],
            rotary_scaling_factor=rope["factor"] if stretched else 1.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
            num_moe_experts=config.n_routed_experts,
            moe_layer_freq=[0] * dense + [1] * (config.num_hidden_layers - dense),
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_shared_expert_intermediate_size=config.moe_intermediate_size
            * config.n_shared_experts,
            # It needs CUDA streams.
            moe_shared_expert_overlap=False,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_score_function="sigmoid" if sigmoid else "softmax",
            moe_router_enable_expert_bias=sigmoid,
            moe_router_dtype="fp32",
        )

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return SafeTensorIO(self._get_actual_hf_path(weights_path))


def check(config: Any, parallelism: Parallelism) -> None:  # noqa: ANN401 - transformers' configurations have no common type
    """Check that a DeepSeek model is supported with this parallelism.

    Raises:
        UnsupportedModelError: it is not.
    """
    if config.attention_bias:
        raise UnsupportedModelError(
            "attention_bias: the megatron trainer does not support biases in DeepSeek attention;"
            " use backend torch"
        )
    if not config.n_shared_experts:
        raise UnsupportedModelError(
            "n_shared_experts: the megatron trainer only supports DeepSeek models with shared"
            " experts; use backend torch"
        )
    for name, size in {
        "q_lora_rank": config.q_lora_rank or 0,
        "kv_lora_rank + qk_rope_head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
    }.items():
        if size % parallelism.tensor:
            raise UnsupportedModelError(
                f"{name} {size} is not divisible by trainer.tensor_parallel {parallelism.tensor}"
            )


def use_latent_attention(layer: ModuleSpec, config: Any) -> None:  # noqa: ANN401 - as above
    """Make a layer specification compute attention and select experts as in Hugging Face.

    Args:
        layer: a specification of megatron-core's own modules.
        config: the Hugging Face configuration.
    """
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    attention.module = LatentAttention
    attention.params = attention.params | {"positions": rotary_of(config)}
    if mlp.module is MoELayer:
        routing = routing_of(config)

        def router(config: MLATransformerConfig, pg_collection: ProcessGroupCollection) -> Router:
            return Router(config, pg_collection, routing)

        mlp.submodules.router = router


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary positions."""

    frequencies_R: Tensor
    """Frequencies of the R / 2 pairs of elements, float32, in radians per position."""
    factor: float
    """Factor by which rotated elements are multiplied."""
    interleaved: bool
    """Whether the elements of a pair are adjacent; otherwise they are half a head apart."""

    def on(self, device: torch.device) -> "Rotary":
        """Return this object with its frequencies on a device, copied if necessary."""
        if self.frequencies_R.device == device:
            return self
        return replace(self, frequencies_R=self.frequencies_R.to(device))

    def rotate(self, heads_SHR: Tensor, positions_S: Tensor) -> Tensor:
        """Return rotated elements, with the first elements of all pairs before the second ones.

        The order does not matter because it is the same for queries and keys.
        """
        angles_SR = positions_S[:, None].float() * self.frequencies_R
        cos, sin = (
            (turned * self.factor).to(heads_SHR.dtype)[:, None]
            for turned in (angles_SR.cos(), angles_SR.sin())
        )
        first, second = (
            (heads_SHR[..., 0::2], heads_SHR[..., 1::2])
            if self.interleaved
            else heads_SHR.chunk(2, -1)
        )
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotary_of(config: Any) -> Rotary:  # noqa: ANN401 - as above
    """Return the rotary positions of a Hugging Face configuration."""
    # V2 always uses adjacent pairs; V3 configures it.
    return Rotary(*rotary.frequencies(config), getattr(config, "rope_interleave", True))


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-head latent attention: keys and values come from one compressed state per position.

    Down-projections are tensor-parallel like all other layers, and their outputs are gathered.
    """

    def __init__(  # noqa: PLR0917 - megatron-core builds it
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        positions: Rotary,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection
        )
        self._rotary = positions
        self.kv_layernorm.eps = _LATENT_NORM_EPS
        if config.q_lora_rank is not None:
            self.q_layernorm.eps = _LATENT_NORM_EPS

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,  # noqa: ARG002 - as above, without any
        position_ids: None = None,  # noqa: ARG002 - as above, without any
        packed_seq_params: PackedSeqParams | None = None,
        **_nothing: object,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return queries and keys [S, H, qk], values [S, H, v], and no compressed ones.

        Args:
            hidden_states: [S, 1, hidden]; with sequence parallelism, the positions of this rank.
            key_value_states: always None.
            position_ids: always None; positions follow from the sequences.
            packed_seq_params: the sequences.
            _nothing: arguments for inference.
        """
        sequences = packed_seq_params
        assert isinstance(sequences, DividedSequences), sequences  # noqa: S101 - the trainer's own
        positions_S, config, hidden = sequences.positions_S, self.config, hidden_states.squeeze(1)
        # Once for all passes, because this is the only transfer that waits for the host.
        self._rotary = self._rotary.on(hidden.device)
        query_SHE = self._heads(self._queries(hidden))
        compressed = _gathered(self.linear_kv_down_proj(hidden)[0])
        latent, key_SR = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        kv_SHE = self._heads(self.linear_kv_up_proj(self.kv_layernorm(self._held(latent)))[0])
        plain, turning = query_SHE.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        query = torch.cat([plain, self._rotary.rotate(turning, positions_S)], -1)
        # All heads share it, but each rank has the partial gradient of its own heads.
        shared = copy_to_tensor_model_parallel_region(key_SR).unsqueeze(1)
        shared = self._rotary.rotate(shared, positions_S).expand(-1, kv_SHE.shape[1], -1)
        plain, value = kv_SHE.split([config.qk_head_dim, config.v_head_dim], -1)
        return query, torch.cat([plain, shared], -1), value, None, None

    def _queries(self, hidden: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            plain: Tensor = self.linear_q_proj(hidden)[0]
            return plain
        latent = self._held(_gathered(self.linear_q_down_proj(hidden)[0]))
        expanded: Tensor = self.linear_q_up_proj(self.q_layernorm(latent))[0]
        return expanded

    def _held(self, latent: Tensor) -> Tensor:
        """Return the positions that linear layers process on this rank."""
        if not self.config.sequence_parallel:
            return latent
        result: Tensor = scatter_to_sequence_parallel_region(latent)
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        heads: int = self.num_attention_heads_per_partition
        by_head: Tensor = projected.unflatten(-1, (heads, -1))
        return by_head


def _gathered(part: Tensor) -> Tensor:
    """Gather the full output of a column-parallel layer."""
    whole: Tensor = gather_from_tensor_model_parallel_region(part)
    return whole


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are routed to experts."""

    chosen: int
    """Experts per token."""
    groups: int
    """Number of expert groups of equal size."""
    chosen_groups: int
    """Number of groups from which a token's experts are selected."""
    best: int
    """Number of top expert scores that are summed for the score of a group."""
    score: Literal["sigmoid", "softmax"]
    normed: bool
    """Whether the weights of the selected experts are normalized to sum to one before scaling."""
    scale: float


def routing_of(config: Any) -> Routing:  # noqa: ANN401 - as above
    """Return the routing of a Hugging Face configuration."""
    version_3 = config.model_type == "deepseek_v3"
    grouped = version_3 or config.topk_method == "group_limited_greedy"
    return Routing(
        config.num_experts_per_tok,
        config.n_group if grouped else 1,
        config.topk_group if grouped else 1,
        best=2 if version_3 else 1,
        score="sigmoid" if version_3 else "softmax",
        normed=version_3 and bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
    )


def choose(logits_NE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Select experts as in the technical reports of DeepSeek-V3 (arXiv 2412.19437, 2.1.2) and V2.

    Args:
        logits_NE: float32.
        bias_E: a bias that is added to scores only for selecting experts.
        routing: the routing parameters.

    Returns:
        The weights of experts, 0 for unselected ones, and the selection, each [N, E].
    """
    scores_NE = logits_NE.sigmoid() if routing.score == "sigmoid" else logits_NE.softmax(-1)
    merits_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
    merits_NGE = merits_NE.unflatten(1, (routing.groups, -1))
    best_NG = merits_NGE.topk(routing.best, -1).values.sum(-1)
    groups = best_NG.topk(routing.chosen_groups, -1).indices
    allowed_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter(1, groups, value=True)
    merits_NE = merits_NGE.masked_fill(~allowed_NG[..., None], float("-inf")).flatten(1)
    experts = merits_NE.topk(routing.chosen, -1).indices
    weights = scores_NE.gather(1, experts)
    if routing.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter(1, experts, value=True)
    return torch.zeros_like(scores_NE).scatter(1, experts, weights * routing.scale), chosen_NE


class Router(TopKRouter):  # type: ignore[misc]
    """Routes tokens to experts."""

    def __init__(
        self, config: MLATransformerConfig, pg_collection: ProcessGroupCollection, routing: Routing
    ) -> None:
        super().__init__(config, pg_collection)
        self._routing = routing

    def routing(
        self,
        logits: Tensor,
        padding_mask: None = None,  # noqa: ARG002 - megatron-core gives none
    ) -> tuple[Tensor, Tensor]:
        """Return weights and selection of experts, each [S * B, E], from logits [S, B, E]."""
        return choose(logits.flatten(0, -2), self.expert_bias, self._routing)
