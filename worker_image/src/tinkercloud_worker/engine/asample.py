"""From an asample request to something a sampler can run: checks, and what was left open."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.sampling import (
    MAX_TOP_LOGPROBS,
    ModelInput,
    SampleRequest,
    SamplingParams,
    WireTensor,
)
from tinkercloud_protocol.tensors import Int32Array, densify
from tinkercloud_worker.engine.batch import TokenLimits, check_length
from tinkercloud_worker.engine.sampler import PromptLogprobParams, SamplingRequest, StopRules

_SEED_MASK = (1 << 63) - 1

GREEDY_BELOW = 1e-5
"""Lower temperatures take the most likely token: the rounding of logits would decide otherwise, and
quotients overflow. SGLang and vLLM have such a limit too, at 1e-6 and 1e-5."""
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 1024
"""Of each string: they are looked for at every token that is drawn."""
MAX_PROMPT_CELLS = 1 << 24
"""Values that may be asked for about one prompt: its tokens times what is asked at each of them.
The answer has 4 to 12 bytes for each, whether a request names a token there or nothing."""


MAX_SAMPLE_CELLS = 1 << 26
"""Alternatives that may be returned for the tokens that a request draws, at 8 bytes each."""


def prepare(
    request: SampleRequest, limits: TokenLimits, end_tokens: frozenset[int], random_seed: int
) -> SamplingRequest:
    """Check a request and fill in its defaults.

    Args:
        request: as it came.
        limits: vocabulary and context length of the served model.
        end_tokens: tokens that end a text of that model.
        random_seed: used if the request names none.

    Raises:
        InvalidRequest: the prompt, a length or a question is not acceptable.
    """
    prompt = _prompt(request.prompt, limits)
    room = limits.max_context_length - len(prompt)
    params = request.sampling_params
    # The last token drawn is never read: nothing is drawn after it.
    if params.max_tokens is not None and params.max_tokens > room + 1:
        raise InvalidRequest(
            f"sampling_params.max_tokens: the prompt has {len(prompt)} tokens, so at most"
            f" {room + 1} can follow (context length {limits.max_context_length}, and one token"
            f" after it), got {params.max_tokens}"
        )
    max_tokens = params.max_tokens or max(room, 1)
    cells = request.num_samples * max_tokens * request.topk_sample_logprobs
    if cells > MAX_SAMPLE_CELLS:
        raise InvalidRequest(
            f"topk_sample_logprobs: {request.num_samples} samples of up to {max_tokens} tokens with"
            f" {request.topk_sample_logprobs} alternatives each are {cells} values, at most"
            f" {MAX_SAMPLE_CELLS} are returned: ask for fewer, or give a smaller max_tokens"
        )
    seed = params.seed if params.seed is not None else random_seed
    return SamplingRequest(
        prompt=prompt,
        num_samples=request.num_samples,
        max_tokens=max_tokens,
        seed=seed & _SEED_MASK,
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        stop=stop_rules(params, end_tokens, limits.vocab_size),
        top_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=_prompt_logprobs(request, len(prompt), limits),
    )


def _prompt(prompt: ModelInput, limits: TokenLimits) -> Int32Array:
    token_ids = prompt.token_ids()
    check_length(len(token_ids), limits, "prompt")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(_where_outside(prompt, limits.vocab_size))
    return np.asarray(token_ids, dtype=np.int32)


def _where_outside(prompt: ModelInput, vocab_size: int) -> str:
    """Return which token is outside the vocabulary, where one is."""
    chunk, index, token = next(
        (chunk, index, token)
        for chunk, part in enumerate(prompt.chunks)
        for index, token in enumerate(part.tokens or ())
        if not 0 <= token < vocab_size
    )
    return (
        f"prompt.chunks[{chunk}].tokens[{index}] is token id {str(token)[:40]}: the model's"
        f" vocabulary is 0..{vocab_size - 1}"
    )


def stop_rules(params: SamplingParams, end_tokens: frozenset[int], vocab_size: int) -> StopRules:
    """Read the `stop` parameter; see `SamplingParams.stop`.

    Raises:
        InvalidRequest: there are too many stops, or one is too long, empty or no token.
    """
    stop = params.stop
    if stop is None:
        return StopRules(end_tokens, ())
    entries = [stop] if isinstance(stop, str) else stop
    if not entries:
        return StopRules(frozenset(), ())
    if len(entries) > MAX_STOPS:
        raise InvalidRequest(
            f"sampling_params.stop has {len(entries)} entries, at most {MAX_STOPS} are accepted"
        )
    if "" in entries:
        raise InvalidRequest("sampling_params.stop holds an empty string, which ends everywhere")
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"sampling_params.stop has a string of {longest} characters, at most"
            f" {MAX_STOP_CHARACTERS} are accepted"
        )
    return StopRules(end_tokens | _stop_tokens(entries, vocab_size), strings)


def _stop_tokens(entries: Sequence[str | int], vocab_size: int) -> frozenset[int]:
    for index, entry in enumerate(entries):
        if isinstance(entry, int) and not 0 <= entry < vocab_size:
            raise InvalidRequest(
                f"sampling_params.stop[{index}] is token id {str(entry)[:40]}, which is never"
                f" drawn: the model's vocabulary is 0..{vocab_size - 1}; [] switches all stops off"
            )
    return frozenset(entry for entry in entries if isinstance(entry, int))


def _prompt_logprobs(
    request: SampleRequest, length: int, limits: TokenLimits
) -> PromptLogprobParams:
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > max(length - 1, 1):
        raise InvalidRequest(
            f"prompt_logprobs_last_n: {last_n} is more than the {length - 1} tokens after the"
            " prompt's first one"
        )
    _check_cells(request, length)
    start = length - last_n if last_n is not None else 1
    return PromptLogprobParams(
        logprobs_from=max(start, 1) if request.scores_prompt else None,
        top_k=request.topk_prompt_logprobs,
        targets=_target_ids(request.target_prompt_logprobs, length, limits),
        alternatives_k=request.prompt_alt_tokens_k,
    )


def _check_cells(request: SampleRequest, length: int) -> None:
    """Check that the answer about a prompt has a bound, before room is made for any of it."""
    tensor = request.target_prompt_logprobs
    shape = (tensor.shape if tensor is not None else None) or []
    columns = shape[1] if len(shape) == 2 else 0
    if columns > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"target_prompt_logprobs: shape {shape} has {columns} token ids at each"
            f" position, at most {MAX_TOP_LOGPROBS} are accepted"
        )
    asked = request.topk_prompt_logprobs + request.prompt_alt_tokens_k + columns
    if asked * length > MAX_PROMPT_CELLS:
        raise InvalidRequest(
            "topk_prompt_logprobs, prompt_alt_tokens_k and the columns of target_prompt_logprobs"
            f" are {asked} together; a prompt of {length} tokens may be asked for"
            f" {MAX_PROMPT_CELLS // length}: ask for fewer in one request"
        )


def _target_ids(
    tensor: WireTensor | None, length: int, limits: TokenLimits
) -> npt.NDArray[np.int64] | None:
    if tensor is None:
        return None
    where = "target_prompt_logprobs"
    shape = tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
        raise InvalidRequest(
            f"{where} must be an int64 tensor of shape [{length - 1}, K] (prompt length - 1), got"
            f" {tensor.dtype} {shape}"
        )
    for value in tensor.data:
        if isinstance(value, float) and not (value.is_integer() and abs(value) < 2**63):
            raise InvalidRequest(
                f"{where}.data: dtype int64 takes whole numbers of 64 bits, got {value}"
            )
    values = np.asarray(tensor.data, dtype=np.int64)
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        crow = np.asarray(tensor.sparse_crow_indices, dtype=np.int64)
        col = np.asarray(tensor.sparse_col_indices, dtype=np.int64)
        dense = densify(values, crow, col, shape=shape, where=where, fill=-1).astype(np.int64)
    elif values.size == shape[0] * shape[1]:
        dense = values.reshape(shape)
    else:
        raise InvalidRequest(f"{where}: shape {shape} does not hold {values.size} values")
    if dense.size and (dense.min() < -1 or dense.max() >= limits.vocab_size):
        raise InvalidRequest(
            f"{where} holds a token id outside 0..{limits.vocab_size - 1} (-1 asks nothing)"
        )
    return dense
