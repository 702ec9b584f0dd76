"""Models that SGLang computes otherwise than their configuration says, without a word.

Of them a trainer's logprobs and an engine's are those of two models. All is by the source of SGLang
0.5.23; plans (`tinkercloud_crds.planning.computed`) foresee what is refused here.
"""

from transformers import AutoConfig

from tinkercloud_worker import architecture
from tinkercloud_worker.architecture import UnsupportedModelError, check_folder
from tinkercloud_worker.packing import mask_kinds

_WITHOUT_WINDOWS = frozenset(
    {
        "mistral",
        "mixtral",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    }
)
"""Families whose windows it does not read."""
_ELSEWHERE = "sample with backend torch (no sampler.engines) or a vLLM server"


def check(path: str, max_context_length: int | None) -> None:
    """Check that engines compute a model as trainers do.

    Args:
        path: of the model's folder, which may lack the weights.
        max_context_length: tokens of the longest sequence; None for what the model takes.

    Raises:
        UnsupportedModelError: they don't.
    """
    check_folder(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    family = config.model_type
    if family.startswith("gemma"):
        raise UnsupportedModelError(
            f"model_type: {family!r}: SGLang leaves out what adapters add to Gemma's output layer;"
            f" {_ELSEWHERE}"
        )
    window: int = getattr(config, "sliding_window", None) or 0
    has_windows = window > 0 and "sliding_attention" in mask_kinds(config)
    if not has_windows or family not in _WITHOUT_WINDOWS:
        return
    longest = min(max_context_length or 1 << 62, architecture.max_context_length(config))
    if window < longest:
        raise UnsupportedModelError(
            f"sliding_window: SGLang attends to whole sequences of {family}, which is the same for"
            f" up to {window} tokens, but sequences may have {longest}; set maxContextLength to"
            f" {window} or less, or {_ELSEWHERE}"
        )
