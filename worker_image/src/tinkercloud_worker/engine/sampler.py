"""What a sampler does: draw continuations from immutable, named versions of a model's weights.

A version is published once under a name that is never used again, and keeps its weights until it
is retired, whatever the trainer does meanwhile. Methods are coroutines of the head's event loop;
cancelling `sample` gives up the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.payloads import (
    Int32Array,
    PromptScores,
    SampledSequence,
    densify,
)
from tinkercloud_protocol.sampling import (
    MAX_TOP_LOGPROBS,
    SampleRequest,
    SamplingParams,
    WireTensor,
)
from tinkercloud_worker.engine.batch import TokenLimits, check_tokens
from tinkercloud_worker.engine.trainer import WeightsSnapshot

_SEED_MASK = (1 << 63) - 1

MAX_PROMPT_CELLS = 1 << 24
"""Values that may be asked for about one prompt: its tokens times what is asked at each of them.
The answer has 4 to 12 bytes for each, whether a request names a token there or nothing."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends, other than by its length."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptQuestions:
    """What is asked about the prompt itself, a sequence of P tokens."""

    logprobs_from: int | None = None
    """First position whose logprob is wanted (at least 1); None for none."""
    top_k: int = 0
    """Most likely tokens wanted at each position from `logprobs_from`, or 1 if that is None."""
    targets: npt.NDArray[np.int64] | None = None
    """Token ids to score, [P - 1, K]; row i belongs to position i + 1, -1 asks nothing."""
    alternatives_k: int = 0
    """Tokens to draw at each position after the first."""

    @property
    def first_position(self) -> int | None:
        """The earliest position that must be scored; None if nothing is asked."""
        starts = [self.logprobs_from] if self.logprobs_from is not None else []
        if self.top_k and not starts:
            starts.append(1)
        if self.targets is not None:
            named = np.flatnonzero((self.targets >= 0).any(axis=1))
            starts.extend((int(named[0]) + 1,) if named.size else ())
        if self.alternatives_k:
            starts.append(1)
        return min(starts) if starts else None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRequest:
    """A sound asample request."""

    prompt: Int32Array
    num_samples: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    """0 for all."""
    top_p: float
    stop: StopRules
    top_logprobs: int = 0
    """Most likely tokens wanted at each drawn position."""
    questions: PromptQuestions = field(default_factory=PromptQuestions)

    @property
    def num_bytes(self) -> int:
        """What its prompt and the token ids to score take."""
        targets = self.questions.targets
        return self.prompt.nbytes + (targets.nbytes if targets is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingResult:
    """What came of a request."""

    sequences: Sequence[SampledSequence]
    prompt: PromptScores


class Sampler(Protocol):
    """Draws continuations. Methods raise InvalidRequest for what the client got wrong."""

    async def publish(self, version: str, weights: WeightsSnapshot | None) -> None:
        """Make weights (None: the base model's own) available under a new name."""

    async def retire(self, version: str) -> None:
        """Forget a version. Requests that run with it may finish. Unknown names are fine."""

    async def export(self, version: str) -> WeightsSnapshot | None:
        """Return the weights a version was published with; None means the base model's own.

        Raises:
            NotFound: the version is unknown.
        """

    async def sample(self, version: str, request: SamplingRequest) -> SamplingResult:
        """Draw `num_samples` continuations and answer the questions about the prompt.

        Raises:
            NotFound: the version is unknown.
        """

    async def close(self) -> None:
        """Let go of what outlives this process, within seconds. Requests that still run fail."""


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
    prompt = _token_array(request.prompt.token_ids())
    check_tokens(prompt, limits, "prompt")
    room = limits.max_context_length - len(prompt)
    params = request.sampling_params
    if room < 1 or (params.max_tokens or 1) > room:
        raise InvalidRequest(
            f"sampling_params.max_tokens: the prompt has {len(prompt)} tokens, so at most {room}"
            f" can follow (context length {limits.max_context_length}), got {params.max_tokens}"
        )
    seed = params.seed if params.seed is not None else random_seed
    return SamplingRequest(
        prompt=prompt,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens or room,
        seed=seed & _SEED_MASK,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        stop=stop_rules(params, end_tokens),
        top_logprobs=request.topk_sample_logprobs,
        questions=_questions(request, len(prompt), limits),
    )


def _token_array(token_ids: list[int]) -> Int32Array:
    try:
        return np.asarray(token_ids, dtype=np.int32)
    except OverflowError:
        raise InvalidRequest("prompt holds a token id that is not a 32-bit integer") from None


def stop_rules(params: SamplingParams, end_tokens: frozenset[int]) -> StopRules:
    """Read the `stop` parameter; see `SamplingParams.stop`."""
    stop = params.stop
    if stop is None:
        return StopRules(end_tokens, ())
    entries = [stop] if isinstance(stop, str) else stop
    if not entries:
        return StopRules(frozenset(), ())
    if "" in entries:
        raise InvalidRequest("sampling_params.stop holds an empty string, which ends everywhere")
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    ids = frozenset(entry for entry in entries if isinstance(entry, int))
    return StopRules(end_tokens | ids, strings)


def _questions(request: SampleRequest, length: int, limits: TokenLimits) -> PromptQuestions:
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > max(length - 1, 1):
        raise InvalidRequest(
            f"prompt_logprobs_last_n: {last_n} is more than the {length - 1} tokens after the"
            " prompt's first one"
        )
    _check_cells(request, length)
    wants_logprobs = bool(request.prompt_logprobs)
    start = length - last_n if last_n is not None else 1
    return PromptQuestions(
        logprobs_from=max(start, 1) if wants_logprobs else None,
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
