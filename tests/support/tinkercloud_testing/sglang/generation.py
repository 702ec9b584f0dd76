"""Generation by the fake SGLang engine: results of the torch sampler in SGLang's format."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tinkercloud_protocol.requests.tensors import (
    FloatArray,
    PromptScores,
    SampledSequence,
    TopLogprobs,
)
from tinkercloud_testing.sglang.source import (
    File,
    Json,
    cut,
    definition,
    finish_reasons,
    numbers,
    run,
)
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer
from tinkercloud_testing.training.engines import Engine
from tinkercloud_worker.engine.sampling.sampler_interface import (
    UNCHANGED,
    LogitChanges,
    PromptLogprobParams,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.torch_sampler.decode.logit_changes import ChangedLogits


async def generated(
    engine: Engine, version: str, asked: Any, index: int, *, tempered: bool
) -> Json:
    """Return the fields of SGLang's response for one prompt.

    Args:
        engine: the engine that computes.
        version: version of its sampler.
        asked: SGLang's GenerateReqInput with several prompts.
        index: index of the prompt.
        tempered: whether logprobs are those at the sampling temperature.
    """
    params: Any = definition("SamplingParams", File.SAMPLING).model_validate(
        asked.sampling_params[index]
    )
    if (params.top_k or 0) >= 1 << 31:
        # SGLang stores it in a 32-bit tensor.
        raise EOFError
    request = _request(asked, index, params)
    result = await engine.sampler.sample(version, request)
    [sequence] = result.sequences
    if params.max_new_tokens == 0:
        sequence = SampledSequence([], [], stopped=False)
    elif tempered:
        sequence = await _tempered(engine, version, request, sequence)
    elif request.changes != UNCHANGED:
        sequence = await _changed(engine, version, request, sequence)
    over_string = ended(params, sequence.tokens, byte_tokenizer())
    if over_string is not None:
        sequence = _first(sequence, over_string[0])
    prompt = result.prompt
    return {
        "finished_reasons": [over_string[1] if over_string else _finish_reason(sequence)],
        "output_strs": [""],
        "output_ids": [list(sequence.tokens)],
        "prompt_tokens": [len(request.prompt)],
        "completion_tokens": [len(sequence.tokens)],
        "reasoning_tokens": [0],
        "cached_tokens": [prompt.cached_tokens],
        "retraction_counts": [0],
        "output_token_logprobs_val": [list(sequence.logprobs)],
        "output_token_logprobs_idx": [list(sequence.tokens)],
        **_rows("output_top_logprobs", _top(sequence.top)),
        **_input_logprobs(asked, index, request, prompt),
        **dict.fromkeys(
            (
                "output_token_ids_logprobs_val",
                "output_token_ids_logprobs_idx",
                "output_token_entropy_val",
                "output_token_sampling_mask",
                "output_hidden_states",
                "routed_experts",
                "indexer_topk",
                "placeholder_tokens_idx",
                "placeholder_tokens_val",
            )
        ),
    }


def _first(sequence: SampledSequence, count: int) -> SampledSequence:
    """Return the first tokens of a sequence."""
    top = sequence.top
    if top is not None:
        top = TopLogprobs(top.token_ids[:count], top.logprobs[:count])
    tokens, logprobs = sequence.tokens[:count], sequence.logprobs[:count]
    return SampledSequence(tokens, logprobs, stopped=True, top=top)


async def _tempered(
    engine: Engine, version: str, request: SamplingRequest, sequence: SampledSequence
) -> SampledSequence:
    """Return logprobs at the sampling temperature, as SGLang does by default."""
    scored = await _all_logprobs(engine, version, request, sequence)
    return _with_logprobs(sequence, scored / request.temperature)


async def _changed(
    engine: Engine, version: str, request: SamplingRequest, sequence: SampledSequence
) -> SampledSequence:
    """Return logprobs after penalties and biases, which SGLang applies to the logits in place."""
    scored = torch.from_numpy(await _all_logprobs(engine, version, request, sequence))
    changed = ChangedLogits(request.changes, request.prompt.tolist(), scored[0])
    rows = []
    for row, token in zip(scored, sequence.tokens, strict=True):
        rows.append(changed.of(row))
        changed.add(token)
    return _with_logprobs(sequence, torch.stack(rows).numpy())


async def _all_logprobs(
    engine: Engine, version: str, request: SamplingRequest, sequence: SampledSequence
) -> FloatArray:
    """Return the model's logprobs of all tokens at each position of a sample."""
    text = [*request.prompt.tolist(), *sequence.tokens]
    every = list(range(engine.trainer.limits.vocab_size))
    targets = np.tile(np.asarray(every, np.int64), (len(text) - 1, 1))
    asked = _plain_request(text, PromptLogprobParams(targets=targets))
    scored = (await engine.sampler.sample(version, asked)).prompt.targets
    assert scored is not None
    return scored[len(request.prompt) - 1 :]


def _with_logprobs(sequence: SampledSequence, logits: FloatArray) -> SampledSequence:
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    picked = [float(logprobs[i, token]) for i, token in enumerate(sequence.tokens)]
    return replace(sequence, logprobs=picked)


def _request(asked: Any, index: int, params: Any) -> SamplingRequest:
    stops = frozenset(params.stop_token_ids or ())
    ends = frozenset() if params.ignore_eos else stops | {EOS_TOKEN_ID}
    return SamplingRequest(
        prompt=np.asarray(asked.input_ids[index], np.int32),
        num_samples=1,
        max_tokens=max(params.max_new_tokens, 1),
        seed=42 if params.sampling_seed is None else params.sampling_seed,
        temperature=params.temperature,
        top_k=max(params.top_k or 0, 0),
        top_p=params.top_p,
        # Stop strings are applied afterwards, by truncating the sequence.
        stop=StopRules(ends, ()),
        top_logprobs=asked.top_logprobs_num,
        prompt_logprobs=_prompt_logprobs(asked, index),
        changes=LogitChanges(
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            bias=tuple((int(key), value) for key, value in (params.logit_bias or {}).items()),
        ),
        min_p=params.min_p,
    )


def _plain_request(prompt: list[int], prompt_logprobs: PromptLogprobParams) -> SamplingRequest:
    ends = StopRules(frozenset(), ())
    tokens = np.asarray(prompt, np.int32)
    return SamplingRequest(tokens, 1, 1, 1, 0.0, 0, 1.0, ends, prompt_logprobs=prompt_logprobs)


def _prompt_logprobs(asked: Any, index: int) -> PromptLogprobParams:
    start, length = asked.logprob_start_len, len(asked.input_ids[index])
    if start < 0 or length == 1:
        return PromptLogprobParams()
    ids = asked.token_ids_logprob
    rows = np.tile(np.asarray(ids[index], np.int64), (length - 1, 1)) if ids else None
    return PromptLogprobParams(start + 1, asked.top_logprobs_num, rows)


def _input_logprobs(asked: Any, index: int, request: SamplingRequest, prompt: PromptScores) -> Json:
    """Return SGLang's fields for positions from logprob_start_len; the first one is empty."""
    start, tokens = asked.logprob_start_len, request.prompt.tolist()
    if start < 0:
        names = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
        return {f"{name}_{part}": None for name in names for part in ("val", "idx")}
    scores = [] if prompt.logprobs is None else prompt.logprobs[start + 1 :].tolist()
    top = _top(prompt.top)
    named = None
    if prompt.targets is not None:
        ids = np.asarray([asked.token_ids_logprob[index]] * (len(tokens) - 1))
        named = [
            (None, None),
            *zip(prompt.targets[start:].tolist(), ids[start:].tolist(), strict=True),
        ]
    return {
        "input_token_logprobs_val": [[None, *scores]],
        "input_token_logprobs_idx": [tokens[start:]],
        **_rows("input_top_logprobs", top and [(None, None), *top[start + 1 :]]),
        **_rows("input_token_ids_logprobs", named),
    }


def _top(top: TopLogprobs | None) -> list[tuple[Any, Any]] | None:
    """Return the logprobs and the tokens of each position."""
    if top is None:
        return None
    return list(zip(top.logprobs.tolist(), top.token_ids.tolist(), strict=True))


def _rows(name: str, rows: Sequence[tuple[Any, Any]] | None) -> Json:
    """Return the two fields that have one sequence's rows of (logprobs, tokens)."""
    values, ids = (None, None) if rows is None else ([[row[i] for row in rows]] for i in (0, 1))
    return {f"{name}_val": values, f"{name}_idx": ids}


def _finish_reason(sequence: SampledSequence) -> Json:
    sglang = finish_reasons()
    if sequence.stopped:
        reason = sglang.FINISH_MATCHED_TOKEN(sequence.tokens[-1])
    else:
        reason = sglang.FINISH_LENGTH(len(sequence.tokens))
    return dict(reason.to_json())


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
        *numbers(File.SAMPLING),
        *cut(File.SAMPLING, *names, "raise_if_tokenizer_required"),
        *cut(File.BATCH, *_METHODS),
    ]
    return run(nodes, re=re, sre_parse=import_module("re._parser"), **vars(finish_reasons()))
