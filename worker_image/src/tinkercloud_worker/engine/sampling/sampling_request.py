"""Validates asample requests and fills in their defaults."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.sampling_requests import (
    MAX_TOP_LOGPROBS,
    ModelInput,
    SampleRequest,
    SamplingParams,
    WireTensor,
)
from tinkercloud_protocol.requests.tensors import Int32Array, densify
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.batch import ModelLimits, check_length
from tinkercloud_worker.engine.prompt_images import TEXT_ONLY, PromptImages
from tinkercloud_worker.engine.sampling.sampler_interface import (
    LogitChanges,
    PromptLogprobParams,
    SamplingRequest,
    StopRules,
)

_SEED_MASK = (1 << 63) - 1

GREEDY_BELOW = 1e-5
"""Lower temperatures select the most likely token: dividing by them would amplify rounding errors
of the logits, or overflow. SGLang and vLLM have such a limit too, at 1e-6 and 1e-5."""
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 1024
"""Maximum length of a stop string: all are searched for after every sampled token."""
MAX_PROMPT_CELLS = 1 << 24
"""Maximum number of values for one prompt: its tokens times the values per token. The response has
4 to 12 bytes for each, including padding."""


MAX_SAMPLE_CELLS = 1 << 26
"""Maximum number of alternatives to sampled tokens in one response, at 8 bytes each."""


def prepare(
    request: SampleRequest,
    limits: ModelLimits,
    end_tokens: frozenset[int],
    random_seed: int,
    *,
    images: PromptImages = TEXT_ONLY,
) -> SamplingRequest:
    """Validate a request, fill in its defaults, and decode its images.

    Args:
        request: the request as received.
        limits: vocabulary and context length of the served model.
        end_tokens: tokens that end a text of that model.
        random_seed: used if the request has none.
        images: how the model reads images.

    Raises:
        InvalidRequest: the prompt, an image, a length or a parameter is invalid.
    """
    parts = request.prompt.images()
    images.check([("prompt", parts)])
    length = images.length(request.prompt.num_tokens, parts, "prompt")
    text = _text(request.prompt, length, limits)
    room = limits.max_context_length - length
    params = request.sampling_params
    # The last sampled token is never read, so it does not count against the context length.
    if params.max_tokens is not None and params.max_tokens > room + 1:
        raise InvalidRequest(
            f"sampling_params.max_tokens: must be at most {room + 1} for a prompt of"
            f" {length} tokens (the context length is {limits.max_context_length}, and the"
            f" last sampled token does not count), got {params.max_tokens}"
        )
    max_tokens = params.max_tokens or max(room, 1)
    cells = request.num_samples * max_tokens * request.topk_sample_logprobs
    if cells > MAX_SAMPLE_CELLS:
        raise InvalidRequest(
            f"topk_sample_logprobs: {request.num_samples} samples of up to {max_tokens} tokens with"
            f" {request.topk_sample_logprobs} alternatives each are {cells} values; the maximum is"
            f" {MAX_SAMPLE_CELLS}. Lower topk_sample_logprobs, num_samples or max_tokens"
        )
    seed = params.seed if params.seed is not None else random_seed
    stop = stop_rules(params, end_tokens, limits.vocab_size)
    prompt_logprobs = _prompt_logprobs(request, length, limits)
    prompt = images.read(text, parts, "prompt")
    return SamplingRequest(
        prompt=prompt.tokens,
        images=prompt.images,
        num_samples=request.num_samples,
        max_tokens=max_tokens,
        seed=seed & _SEED_MASK,
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        stop=stop,
        top_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=prompt_logprobs,
        changes=_changes(params, limits.vocab_size),
        min_p=params.min_p,
    )


def _changes(params: SamplingParams, vocab_size: int) -> LogitChanges:
    bias = tuple((int(token), value) for token, value in params.logit_bias.items())
    for token, _ in bias:
        if token >= vocab_size:
            raise InvalidRequest(
                f"sampling_params.logit_bias: token ids must be in 0..{vocab_size - 1} (the"
                f" model's vocabulary), got {token}"
            )
    return LogitChanges(
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=bias,
    )


def _text(prompt: ModelInput, length: int, limits: ModelLimits) -> Int32Array:
    """Return the text tokens of a prompt that has this length with its images."""
    check_length(length, limits, "prompt")
    token_ids = prompt.token_ids()
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        raise InvalidRequest(_where_outside(prompt, limits.vocab_size))
    return np.asarray(token_ids, dtype=np.int32)


def _where_outside(prompt: ModelInput, vocab_size: int) -> str:
    """Describe the first token that is outside the vocabulary."""
    chunk, index, token = next(
        (chunk, index, token)
        for chunk, part in enumerate(prompt.chunks)
        for index, token in enumerate(part.token_ids)
        if not 0 <= token < vocab_size
    )
    return (
        f"prompt.chunks[{chunk}].tokens[{index}]: token ids must be in 0..{vocab_size - 1} (the"
        f" model's vocabulary), got {str(token)[:40]}"
    )


def stop_rules(params: SamplingParams, end_tokens: frozenset[int], vocab_size: int) -> StopRules:
    """Parse the `stop` parameter; see `SamplingParams.stop`.

    Raises:
        InvalidRequest: there are too many entries, or one is too long, empty or not a token.
    """
    stop = params.stop
    if stop is None:
        return StopRules(end_tokens, ())
    entries = [stop] if isinstance(stop, str) else stop
    if not entries:
        return StopRules(frozenset(), ())
    if len(entries) > MAX_STOPS:
        raise InvalidRequest(
            f"sampling_params.stop: must have at most {MAX_STOPS} entries, got {len(entries)}"
        )
    if "" in entries:
        raise InvalidRequest("sampling_params.stop: entries must not be empty strings")
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"sampling_params.stop: strings must have at most {MAX_STOP_CHARACTERS} characters, got"
            f" {longest}"
        )
    return StopRules(end_tokens | _stop_tokens(entries, vocab_size), strings)


def _stop_tokens(entries: Sequence[str | int], vocab_size: int) -> frozenset[int]:
    for index, entry in enumerate(entries):
        if isinstance(entry, int) and not 0 <= entry < vocab_size:
            raise InvalidRequest(
                f"sampling_params.stop[{index}]: token ids must be in 0..{vocab_size - 1} (the"
                f" model's vocabulary), got {str(entry)[:40]}; use [] to disable all stops"
            )
    return frozenset(entry for entry in entries if isinstance(entry, int))


def _prompt_logprobs(
    request: SampleRequest, length: int, limits: ModelLimits
) -> PromptLogprobParams:
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > max(length - 1, 1):
        raise InvalidRequest(
            f"prompt_logprobs_last_n: must be at most {length - 1} (all tokens of the prompt"
            f" except the first), got {last_n}"
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
    """Check the size of the scores of a prompt before any of it is allocated."""
    tensor = request.target_prompt_logprobs
    shape = (tensor.shape if tensor is not None else None) or []
    columns = shape[1] if len(shape) == 2 else 0
    if columns > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"target_prompt_logprobs: must have at most {MAX_TOP_LOGPROBS} token ids per position,"
            f" got {columns} (shape {shape})"
        )
    asked = request.topk_prompt_logprobs + request.prompt_alt_tokens_k + columns
    if asked * length > MAX_PROMPT_CELLS:
        raise InvalidRequest(
            "topk_prompt_logprobs, prompt_alt_tokens_k and the columns of target_prompt_logprobs"
            f" add up to {asked}; the maximum for a prompt of {length} tokens is"
            f" {MAX_PROMPT_CELLS // length}. Request fewer, or split the request"
        )


def _target_ids(
    tensor: WireTensor | None, length: int, limits: ModelLimits
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
                f"{where}.data: must be 64-bit integers (dtype int64), got {value}"
            )
    values = np.asarray(tensor.data, dtype=np.int64)
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        crow = np.asarray(tensor.sparse_crow_indices, dtype=np.int64)
        col = np.asarray(tensor.sparse_col_indices, dtype=np.int64)
        dense = densify(values, crow, col, shape=shape, where=where, fill=-1).astype(np.int64)
    elif values.size == shape[0] * shape[1]:
        dense = values.reshape(shape)
    else:
        raise InvalidRequest(f"{where}: {values.size} values do not match shape {shape}")
    if dense.size and (dense.min() < -1 or dense.max() >= limits.vocab_size):
        raise InvalidRequest(
            f"{where}: token ids must be in 0..{limits.vocab_size - 1}, or -1 for padding"
        )
    return dense
