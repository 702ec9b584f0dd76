"""Splits the scoring of a prompt into requests that SGLang can handle.

SGLang scores all tokens of a request at all of its positions, and responds in JSON: targets that
differ between rows would cost the square of the prompt's length. So each request scores a few
positions, with only the tokens of these rows. The prompt of a request ends with its last position,
and earlier tokens are in SGLang's cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from tinkercloud_protocol.requests.tensors import (
    EMPTY_TOP_LOGPROB,
    EMPTY_TOP_TOKEN,
    PromptScores,
    TopLogprobs,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingRequest,
)
from tinkercloud_worker.inference.client import Json
from tinkercloud_worker.inference.dialect import Ranked, top_logprobs

_PART_CELLS = 1 << 15
"""Approximate number of logprobs in one response: about a megabyte of JSON."""
_MAX_CELLS = 1 << 25
"""Maximum number of logprobs in all responses for one prompt."""

Entry = Sequence[Any]
"""[logprob, token id, text or None]; the logprob of the first position is None."""


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """Positions of a prompt that one request scores."""

    start: int
    """First position, at least 1."""
    end: int
    """End of the positions, exclusive."""
    named: Sequence[int]
    """Token ids to score at each position."""


class PromptScoring:
    """Splits the scoring of one prompt into parts, and merges the responses."""

    def __init__(self, request: SamplingRequest) -> None:
        """Split a request.

        Raises:
            InvalidRequest: the responses would be too large.
        """
        self._params = params = request.prompt_logprobs
        length = len(request.prompt)
        self.parts = list(_parts(params, length))
        _check_cells(self.parts, params.top_k)
        self._logprobs = np.full(length, np.nan, np.float32)
        self._top_ids = np.full((length, params.top_k), EMPTY_TOP_TOKEN, np.int32)
        self._top_values = np.full((length, params.top_k), EMPTY_TOP_LOGPROB, np.float32)
        shape = (0, 0) if params.targets is None else params.targets.shape
        self._targets = np.zeros(shape, np.float32)
        self._cached_tokens: int | None = None

    def add(self, part: ScoredPart, meta: Json) -> None:
        """Add SGLang's response for a part (`meta_info`)."""
        params = self._params
        if self._cached_tokens is None:
            # Later parts find the tokens of the first in the cache.
            self._cached_tokens = cached_tokens(meta)
        # The entry before the first position of the part is empty.
        wanted = slice(max(part.start, params.logprobs_from or 1), part.end)
        skipped = wanted.start - part.start + 1
        if params.logprobs_from is not None:
            found = [logprob for logprob, *_ in meta["input_token_logprobs"][skipped:]]
            self._logprobs[wanted] = found
        if params.top_k:
            best = top_logprobs(ranked(meta["input_top_logprobs"][skipped:]), params.top_k)
            self._top_ids[wanted], self._top_values[wanted] = best.token_ids, best.logprobs
        if params.targets is not None and part.named:
            for row, entries in enumerate(meta["input_token_ids_logprobs"][1:], part.start - 1):
                known = {int(token): logprob for logprob, token, *_ in entries}
                self._targets[row] = [
                    known[int(token)] if token >= 0 else 0.0 for token in params.targets[row]
                ]

    def scores(self) -> PromptScores:
        """Return the merged scores."""
        params = self._params
        return PromptScores(
            logprobs=self._logprobs if params.logprobs_from is not None else None,
            top=TopLogprobs(self._top_ids, self._top_values) if params.top_k else None,
            targets=self._targets if params.targets is not None else None,
            cached_tokens=self._cached_tokens or 0,
        )


def _parts(params: PromptLogprobParams, length: int) -> Iterator[ScoredPart]:
    targets = np.empty((length - 1, 0), np.int64) if params.targets is None else params.targets
    size = _PART_CELLS // (1 + params.top_k)
    if columns := targets.shape[1]:
        size = min(size, isqrt(_PART_CELLS // columns))
    size = max(size, 1)
    for start in range(params.first_position or length, length, size):
        end = min(start + size, length)
        named = np.unique(targets[start - 1 : end - 1])
        yield ScoredPart(start, end, named[named >= 0].tolist())


def _check_cells(parts: Sequence[ScoredPart], top_k: int) -> None:
    cells = sum((part.end - part.start) * (1 + top_k + len(part.named)) for part in parts)
    if cells > _MAX_CELLS:
        raise InvalidRequest(
            "target_prompt_logprobs: this model's sampler is SGLang, which scores each token at"
            f" neighbouring positions too: this request needs {cells} logprobs, and the maximum is"
            f" {_MAX_CELLS}. Request fewer tokens or fewer positions, or use a sampler with backend"
            " torch"
        )


def ranked(positions: Sequence[Sequence[Entry] | None]) -> list[Ranked]:
    """Parse the top entries of each position; a position without entries has an empty list."""
    return [[(token, logprob) for logprob, token, *_ in entries or ()] for entries in positions]


def cached_tokens(meta: Json) -> int:
    """Return the number of prompt tokens that SGLang found in its cache (`meta_info`)."""
    return int(meta.get("cached_tokens", 0))
