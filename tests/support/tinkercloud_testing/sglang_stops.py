"""Where SGLang ends a sequence over its stop strings, by its own functions."""

import logging
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tinkercloud_testing.sglang_definitions import BATCH, SAMPLING, compiled, cut, numbers, run
from tinkercloud_testing.sglang_parts import finish_reasons

Json = dict[str, Any]
_METHODS = (
    "_stop_match_tail_len",
    "tail_str",
    "_locate_str_stop_finished_len",
    "_check_str_based_finish",
)


def ended(
    params: Any, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, Json] | None:
    """Return after how many tokens SGLang ends, and why; None if it goes on.

    Args:
        params: SGLang's SamplingParams.
        tokens: that are drawn one after another.
        tokenizer: SGLang's own.

    Raises:
        ValueError: SGLang refuses to look for these.
    """
    sglang = _functions()
    normalized = SimpleNamespace(
        stop_strs=params.stop, stop_regex_strs=params.stop_regex, min_new_tokens=0
    )
    sglang.normalize(normalized, tokenizer)
    drawing = SimpleNamespace(
        sampling_params=normalized, tokenizer=tokenizer, decoded_text="", output_ids=[]
    )
    for name in _METHODS:
        setattr(drawing, name, MethodType(getattr(sglang, name), drawing))
    for token in tokens:
        drawing.output_ids.append(token)
        if drawing._check_str_based_finish():
            return drawing.finished_len, drawing.finished_reason.to_json()
    return None


@cache
def _functions() -> SimpleNamespace:
    names = ("normalize", "get_max_seq_length", "_max_length_from_subpattern")
    nodes = [
        *numbers(SAMPLING),
        *cut(SAMPLING, *names, "raise_if_tokenizer_required"),
        *cut(BATCH, *_METHODS),
    ]
    surroundings = {
        "logger": logging.getLogger(__name__),
        "re": re,
        "sre_parse": import_module("re._parser"),
    }
    return run(compiled(nodes), surroundings | vars(finish_reasons()))
