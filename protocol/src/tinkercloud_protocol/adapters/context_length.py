"""The context length of a model, from the fields of its `config.json`.

Model cards extend a model by a factor in `rope_scaling` and leave `max_position_embeddings` as it
was. vLLM and SGLang then derive the longer context; so does this. Other types, such as `llama3` and
`longrope`, state the extended length in `max_position_embeddings`, and so do Gemma 3 and others
that scale some layers only. Models with `dynamic` are not loaded: their positions differ for each
length of a sequence.
"""

from collections.abc import Mapping
from typing import Any

UNLIMITED = 1 << 20
"""Tokens of a model whose configuration states no limit."""
_EXTENDED = frozenset({"linear", "yarn"})
_STATE_THE_EXTENDED_LENGTH = ("gemma",)
"""Starts of `model_type` whose `max_position_embeddings` includes the factor."""


def context_length(config: Mapping[str, Any]) -> int:
    """Return the maximum context length of a text model, in tokens.

    Args:
        config: the configuration of the text model: `max_position_embeddings`, `model_type`, and
            `rope_scaling` (or `rope_parameters`, as transformers 5 writes it).
    """
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions <= 0:
        return UNLIMITED
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    is_stated = str(config.get("model_type")).startswith(_STATE_THE_EXTENDED_LENGTH)
    if not isinstance(scaling, Mapping) or is_stated:
        return positions
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings") or positions
    if kind not in _EXTENDED:
        return positions
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return positions
    try:
        return max(positions, int(original * factor))
    except (OverflowError, ValueError):
        return positions
