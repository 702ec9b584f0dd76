"""Models that SGLang computes otherwise than their configuration says, or adapts in part.

Mostly it does so silently: then a trainer's logprobs and an engine's are those of two models. All
is from the source of SGLang 0.5.23; plans (`tinkercloud_planning.supported`) foresee what is
refused for it.
"""

from typing import Any

from transformers import AutoConfig

from tinkercloud_worker.engine.batch import capped_context_length
from tinkercloud_worker.model import architecture
from tinkercloud_worker.model.architecture import UnsupportedModelError, check_folder

_WINDOWS_IN_ALL_LAYERS = frozenset(
    {"mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
)
"""Families whose windows SGLang does not read, and whose layers all have one, or none."""
_WINDOWS_IN_SOME_LAYERS = frozenset({"ministral", "qwen2", "qwen2_moe", "qwen3"})
"""The same, but for layers, which `layer_types` tells apart. A Mistral that has those is read as a
Ministral by transformers."""
_WITHOUT_ADAPTED_OUTPUT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4"}
)
"""Families whose output layer it takes from the input embedding, past all adapters."""


def check_windows(path: str, max_context_length: int | None) -> None:
    """Check that engines attend to the positions that a trainer attends to.

    Args:
        path: of the model's folder, which may lack the weights.
        max_context_length: tokens of the longest sequence; None for what the model takes.

    Raises:
        UnsupportedModelError: they don't.
    """
    config = _read(path)
    window = _window(config)
    longest = capped_context_length(max_context_length, architecture.max_context_length(config))
    if window is not None and window < longest:
        raise UnsupportedModelError(
            f"sliding_window: SGLang attends to whole sequences of {config.model_type}, which is"
            f" the same for up to {window} tokens, but sequences may have {longest}; set"
            f" maxContextLength to {window} or less, or sample with backend torch (no"
            " sampler.engines) or a vLLM server"
        )


def unadapted(path: str) -> dict[str, str]:
    """Return what engines can't adapt of a model, and why: by field of `LoraConfig`.

    Args:
        path: of the model's folder, which may lack the weights.
    """
    config = _read(path)
    found = {}
    if config.model_type in _WITHOUT_ADAPTED_OUTPUT:
        found["train_unembed"] = (
            "leaves out what adapters add to the output layer of its family (Gemma)"
        )
    if config.model_type == "mixtral":
        found["train_mlp"] = "takes no adapters of the experts of its family, by their names"
    if getattr(config, "kv_lora_rank", None) and not getattr(config, "q_lora_rank", None):
        found["train_attn"] = (
            "takes no adapters of latent attention whose queries are not compressed"
            " (q_lora_rank: null)"
        )
    return found


def _read(path: str) -> Any:  # noqa: ANN401 - transformers' configurations have no common type
    check_folder(path)
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _window(config: Any) -> int | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return how many positions a trainer attends to where SGLang attends to all."""
    family, window = config.model_type, getattr(config, "sliding_window", None)
    in_some = family in _WINDOWS_IN_SOME_LAYERS and "sliding_attention" in config.layer_types
    return window if in_some or family in _WINDOWS_IN_ALL_LAYERS else None
