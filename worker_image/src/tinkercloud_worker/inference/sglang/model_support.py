"""Models that SGLang computes differently from their configuration, or can't fully adapt.

Mostly this is silent: the logprobs of the trainer and the engine would be those of two models. The
rules are from the source of SGLang 0.5.23; the planner (`tinkercloud_planning.supported`) predicts
the resulting rejections.
"""

from typing import Any

from transformers import AutoConfig

from tinkercloud_worker.engine.batch import capped_context_length
from tinkercloud_worker.model import architecture
from tinkercloud_worker.model.architecture import UnsupportedModelError, check_folder

_WINDOWS_IN_ALL_LAYERS = frozenset(
    {"mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
)
"""Families whose sliding windows SGLang ignores, with a window in all layers or in none."""
_WINDOWS_IN_SOME_LAYERS = frozenset({"ministral", "qwen2", "qwen2_moe", "qwen3"})
"""The same with windows in some layers, according to `layer_types`. transformers loads a Mistral
that has them as a Ministral."""
_WITHOUT_ADAPTED_OUTPUT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4"}
)
"""Families whose output layer is the input embedding without adapters."""
_WITHOUT_ADAPTED_EXPERTS = {"gpt_oss": "gpt-oss", "mixtral": "Mixtral"}
"""Names of families whose stacked experts have no adapters under the names of a checkpoint's."""


def check_windows(path: str, max_context_length: int | None) -> None:
    """Check that engines attend to the same positions as the trainer.

    Args:
        path: the model's folder, with or without weights.
        max_context_length: maximum sequence length in tokens; None for the model's limit.

    Raises:
        UnsupportedModelError: they attend to other positions.
    """
    config = _read(path)
    window = _window(config)
    longest = capped_context_length(max_context_length, architecture.max_context_length(config))
    if window is not None and window < longest:
        raise UnsupportedModelError(
            f"sliding_window: SGLang ignores the window of {config.model_type}, which is correct"
            f" only for sequences of up to {window} tokens, but sequences may have {longest}; set"
            f" maxContextLength to {window} or less, or sample with backend torch (no"
            " sampler.engines) or a vLLM server"
        )


def unadapted(path: str) -> dict[str, str]:
    """Return the fields of `LoraConfig` that engines don't support for a model, with reasons.

    Args:
        path: the model's folder, with or without weights.
    """
    config = _read(path)
    found = {}
    if config.model_type in _WITHOUT_ADAPTED_OUTPUT:
        found["train_unembed"] = "ignores adapters of the output layer of its family (Gemma)"
    if family := _WITHOUT_ADAPTED_EXPERTS.get(config.model_type):
        found["train_mlp"] = f"does not support adapters of the experts of its family ({family})"
    if getattr(config, "kv_lora_rank", None) and not getattr(config, "q_lora_rank", None):
        found["train_attn"] = (
            "does not support adapters of latent attention with uncompressed queries"
            " (q_lora_rank: null)"
        )
    return found


def _read(path: str) -> Any:  # noqa: ANN401 - transformers' configurations have no common type
    check_folder(path)
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _window(config: Any) -> int | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the window of the trainer where SGLang attends to all positions; None if equal."""
    family, window = config.model_type, getattr(config, "sliding_window", None)
    in_some = family in _WINDOWS_IN_SOME_LAYERS and "sliding_attention" in config.layer_types
    return window if in_some or family in _WINDOWS_IN_ALL_LAYERS else None
