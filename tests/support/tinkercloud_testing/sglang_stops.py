"""Where SGLang ends a sequence at a stop string, by its own functions."""

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
    """Return the number of tokens after which SGLang stops, and why; None if it continues.

    Args:
        params: SGLang's SamplingParams.
        tokens: the generated tokens.
        tokenizer: SGLang's tokenizer.

    Raises:
        ValueError: SGLang rejects the stop strings.
    """
    sglang = _functions()
    normalized = SimpleNamespace(
        stop_strs=params.stop, stop_regex_strs=params.stop_regex, min_new_tokens=0
    )
    sglang.normalize(normalized, tokenizer)
    request = SimpleNamespace(
        sampling_params=normalized, tokenizer=tokenizer, decoded_text="", output_ids=[]
    )
    for name in _METHODS:
        setattr(request, name, MethodType(getattr(sglang, name), request))
    for token in tokens:
        request.output_ids.append(token)
        if request._check_str_based_finish():
            return request.finished_len, request.finished_reason.to_json()
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
