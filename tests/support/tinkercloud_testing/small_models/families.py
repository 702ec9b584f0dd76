"""Tiny random models of families with other state or attention than plain causal KV caches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, VOCAB_SIZE

CAP = 0.5
"""The soft cap of logits, low enough to change the logits of random models."""
WINDOW = 9
"""Positions in windows, and selected by sparse attention: fewer than the sequences have."""
ROTARY_SWITCH = 20
"""Length above which the rotary positions of the family `longrope` change."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
_SIZES = SIZES | {"eos_token_id": EOS_TOKEN_ID, "bos_token_id": None, "pad_token_id": None}
_SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.05,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# With few heads, many positions score zero, and the selection among them is arbitrary.
_INDEXED = _LATENT | {"index_topk": WINDOW, "index_head_dim": 16, "index_n_heads": 24}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_SPARSE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": ROTARY_SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": ROTARY_SWITCH,
        "factor": 6.4,
    },
}
_LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _made(name: str, config: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = getattr(transformers, name)(
        getattr(transformers, config)(**_SIZES | changes)
    )
    # transformers initializes with zeros, for which sinks and state biases have no effect.
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "sinks" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    return model


def _family(prefix: str, *, text: str = "", **changes: Any) -> Callable[[], PreTrainedModel]:
    return partial(_made, f"{prefix}ForCausalLM", f"{prefix}{text}Config", **changes)


SLOTTED: dict[str, Callable[[], PreTrainedModel]] = {
    "grouped queries": _family("Llama"),
    "scaled positions": _family("Llama", rope_parameters=_LINEAR),
    "window everywhere": _family("Mistral", sliding_window=WINDOW),
    "windows in masks only": _family("Qwen2Moe", use_sliding_window=True, **_SLIDING, **_SPARSE),
    "window of one size in masks": _family("Phimoe", sliding_window=WINDOW, **_EXPERTS),
    "capped attention": _family(
        "Gemma2", head_dim=8, sliding_window=WINDOW, final_logit_softcapping=CAP
    ),
    "sinks": _family(
        "GptOss",
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_SLIDING,
        **_EXPERTS,
    ),
    "latent attention": _family("DeepseekV3", **_LATENT),
    "learned positions": partial(_made, "GPT2LMHeadModel", "GPT2Config", **_GPT),
    "eager only": _family("GPTJ", rotary_dim=8, **_GPT),
}
"""Families whose sequences are decoded together, in slots."""

ONE_BY_ONE: dict[str, Callable[[], PreTrainedModel]] = {
    "sparse, DeepSeek-V3.2": _family("DeepseekV32", **_INDEXED),
    "sparse, GLM": _family("GlmMoeDsa", **_INDEXED),
    "shared keys, Gemma 3n": _family(
        "Gemma3n",
        text="Text",
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=None,
        laurel_rank=4,
        final_logit_softcapping=CAP,
        **_SHARED_KEYS,
    ),
    "shared keys, Gemma 4": _family(
        "Gemma4", text="Text", global_head_dim=8, final_logit_softcapping=CAP, **_SHARED_KEYS
    ),
    "hybrid, Falcon-H1": _family("FalconH1", **_MAMBA | {"mamba_n_heads": 4}, mamba_d_ssm=32),
    "hybrid, Qwen3-Next": _family("Qwen3Next", **_DELTA, **_SPARSE),
    "hybrid, Qwen3.5": _family("Qwen3_5", text="Text", **_DELTA),
    "hybrid, Jamba": _family(
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "hybrid, Bamba": _family("Bamba", attn_layer_indices=[1], attn_rotary_emb=4, **_MAMBA),
    "hybrid, Zamba2": _family(
        "Zamba2",
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=16,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    "convolutions, LFM2": _family("Lfm2", layer_types=["conv", "full_attention"]),
    "linear attention, MiniMax": _family(
        "MiniMax",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=16,
    ),
    "recurrent, Mamba": _family("Mamba", state_size=8),
    "masks of its own, GPT-Neo": _family(
        "GPTNeo",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    "positions by length, OPT": _family("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "biases by length, Bloom": _family("Bloom", n_layer=2, n_head=4),
}
"""Families whose sequences are decoded one by one."""

longrope = _family("Phi3", **_LONGROPE)
"""Makes a model whose sequences are decoded in slots up to `ROTARY_SWITCH`, then one by one."""

IMAGE_TOKEN, VIDEO_TOKEN = 90, 91
IDS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}

_IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_PATCHES = _PATCHES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
_GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": WINDOW, "pad_token_id": 0}


def _vision_language(
    prefix: str, vision: dict[str, Any], text: dict[str, Any], **changes: Any
) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(3)
        config = getattr(transformers, f"{prefix}Config")(
            text_config=_SIZES | text, vision_config=vision, **changes
        )
        model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
        model.eval()
        return model

    return make


VISION_LANGUAGE: dict[str, Callable[[], PreTrainedModel]] = {
    "Gemma 3": _vision_language(
        "Gemma3", _IMAGES | {"vision_use_head": False}, _GEMMA, mm_tokens_per_image=4
    ),
    "Gemma 3 with a pooling head": _vision_language(
        "Gemma3", _IMAGES, _GEMMA, mm_tokens_per_image=4
    ),
    "Gemma 4": _vision_language(
        "Gemma4",
        _IMAGES | {"num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8},
        _GEMMA
        | {
            "global_head_dim": 8,
            "final_logit_softcapping": CAP,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        audio_config=None,
    ),
    "Qwen2.5-VL": _vision_language(
        "Qwen2_5_VL", _PATCHES | {"fullatt_block_indexes": [0], "window_size": 28}, _SECTIONS
    ),
    "Qwen3-VL": _vision_language("Qwen3VL", _QWEN3_PATCHES, _SECTIONS | {"head_dim": 8}),
    "Qwen3-VL, a mixture": _vision_language(
        "Qwen3VLMoe",
        _QWEN3_PATCHES,
        _SECTIONS
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "Qwen3.5": _vision_language(
        "Qwen3_5", _QWEN3_PATCHES, _DELTA | {"rope_parameters": _SECTIONS["rope_parameters"]}
    ),
    "Mistral 3": _vision_language("Mistral3", _IMAGES, {"model_type": "mistral", "head_dim": 8}),
    "Ministral 3": _vision_language(
        "Mistral3", _IMAGES, {"model_type": "ministral3", "head_dim": 8}
    ),
    "Kimi K2.5": _vision_language(
        "Kimi_K25",
        _IMAGES,
        _LATENT | {"model_type": "deepseek_v3"},
    ),
}
"""Vision-language families; only their text part is served."""

_WITH_PLACEHOLDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen2.5-VL": _vision_language(
        "Qwen2_5_VL", _PATCHES | {"fullatt_block_indexes": [0], "window_size": 28}, _SECTIONS, **IDS
    ),
    "Qwen3-VL": _vision_language("Qwen3VL", _QWEN3_PATCHES, _SECTIONS | {"head_dim": 8}, **IDS),
    "Gemma 3": _vision_language(
        "Gemma3",
        _IMAGES | {"vision_use_head": False},
        _GEMMA,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
    ),
}


def _without_placeholders(make: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """Return a model that never samples a placeholder token, as trained models."""

    def changed() -> PreTrainedModel:
        model = make()
        with torch.no_grad():
            model.get_output_embeddings().weight[[IMAGE_TOKEN, VIDEO_TOKEN]] = 0.0
        return model

    return changed


READS_IMAGES = {name: _without_placeholders(make) for name, make in _WITH_PLACEHOLDERS.items()}
"""Families whose images are read, with placeholder tokens within the vocabulary."""

SCALED: dict[str, Callable[[], PreTrainedModel]] = {
    "Gemma 2": SLOTTED["capped attention"],
    "Granite": _family("Granite", logits_scaling=6.0, residual_multiplier=0.5),
    "Cohere": _family("Cohere", logit_scale=0.0625),
    "Cohere 2": _family("Cohere2", logit_scale=0.25, sliding_window=WINDOW),
    "Falcon-H1": _family(
        "FalconH1", **_MAMBA | {"mamba_n_heads": 4}, mamba_d_ssm=32, lm_head_multiplier=0.5
    ),
}
"""Families that scale or cap their logits."""

llama4 = partial(
    _made,
    "Llama4ForCausalLM",
    "Llama4TextConfig",
    head_dim=8,
    intermediate_size_mlp=48,
    attention_chunk_size=WINDOW,
    pad_token_id=0,
    num_local_experts=2,
    num_experts_per_tok=1,
)
"""Makes a Llama 4: attention in chunks, experts that can't be adapted."""
