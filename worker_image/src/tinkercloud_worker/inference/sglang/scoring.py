"""What is asked about a prompt, in parts that SGLang can answer.

SGLang scores all tokens that a request names at all of its positions, and answers in JSON: targets
that differ from row to row cost the square of the prompt's length. So a prompt is asked about a few
positions at a time, each request naming only the tokens of its own rows. A request's prompt ends
where its positions do, and what comes before them is in SGLang's cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import (
    EMPTY_TOP_LOGPROB,
    EMPTY_TOP_TOKEN,
    PromptScores,
    TopLogprobs,
)
from tinkercloud_worker.engine.sampler import PromptLogprobParams, SamplingRequest
from tinkercloud_worker.inference.client import Json
from tinkercloud_worker.inference.dialect import Ranked, top_logprobs

_PART_CELLS = 1 << 15
"""Logprobs in one answer, or hardly twice as many: a megabyte that is read in one go."""
_MOST_CELLS = 1 << 25
"""Logprobs in all answers about one prompt."""

Entry = Sequence[Any]
"""[logprob, token id, text or None]; at the first position its logprob is None."""


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of a prompt that one request is about."""

    start: int
    """The first, at least 1."""
    end: int
    """After the last."""
    named: Sequence[int]
    """Tokens to score at each of them."""


class PromptScoring:
    """Divides what is asked about one prompt into parts, and puts their answers together."""

    def __init__(self, request: SamplingRequest) -> None:
        """Divide what is asked.

        Raises:
            InvalidRequest: the answers would be too large.
        """
        self._asked = asked = request.prompt_logprobs
        length = len(request.prompt)
        self.parts = list(_parts(asked, length))
        _check_cells(self.parts, asked.top_k)
        self._logprobs = np.full(length, np.nan, np.float32)
        self._top_ids = np.full((length, asked.top_k), EMPTY_TOP_TOKEN, np.int32)
        self._top_values = np.full((length, asked.top_k), EMPTY_TOP_LOGPROB, np.float32)
        shape = (0, 0) if asked.targets is None else asked.targets.shape
        self._targets = np.zeros(shape, np.float32)
        self._cached_tokens: int | None = None

    def add(self, part: Part, meta: Json) -> None:
        """Take SGLang's answer about a part (`meta_info`)."""
        asked = self._asked
        if self._cached_tokens is None:
            # Later parts find what the first has computed.
            self._cached_tokens = cached_tokens(meta)
        # The entry before the part's first position holds nothing.
        wanted = slice(max(part.start, asked.logprobs_from or 1), part.end)
        skipped = wanted.start - part.start + 1
        if asked.logprobs_from is not None:
            found = [logprob for logprob, *_ in meta["input_token_logprobs"][skipped:]]
            self._logprobs[wanted] = found
        if asked.top_k:
            best = top_logprobs(ranked(meta["input_top_logprobs"][skipped:]), asked.top_k)
            self._top_ids[wanted], self._top_values[wanted] = best.token_ids, best.logprobs
        if asked.targets is not None and part.named:
            for row, entries in enumerate(meta["input_token_ids_logprobs"][1:], part.start - 1):
                known = {int(token): logprob for logprob, token, *_ in entries}
                self._targets[row] = [
                    known[int(token)] if token >= 0 else 0.0 for token in asked.targets[row]
                ]

    def scores(self) -> PromptScores:
        """Return the answers about all parts."""
        asked = self._asked
        return PromptScores(
            logprobs=self._logprobs if asked.logprobs_from is not None else None,
            top=TopLogprobs(self._top_ids, self._top_values) if asked.top_k else None,
            targets=self._targets if asked.targets is not None else None,
            cached_tokens=self._cached_tokens or 0,
        )


def _parts(asked: PromptLogprobParams, length: int) -> Iterator[Part]:
    targets = np.empty((length - 1, 0), np.int64) if asked.targets is None else asked.targets
    size = _PART_CELLS // (1 + asked.top_k)
    if columns := targets.shape[1]:
        size = min(size, isqrt(_PART_CELLS // columns))
    size = max(size, 1)
    for start in range(asked.first_position or length, length, size):
        end = min(start + size, length)
        named = np.unique(targets[start - 1 : end - 1])
        yield Part(start, end, named[named >= 0].tolist())


def _check_cells(parts: Sequence[Part], top_k: int) -> None:
    cells = sum((part.end - part.start) * (1 + top_k + len(part.named)) for part in parts)
    if cells > _MOST_CELLS:
        raise InvalidRequest(
            "target_prompt_logprobs: this model's sampler is SGLang, which scores a token that is"
            f" named at one position at those beside it too: {cells} logprobs, and at most"
            f" {_MOST_CELLS} are asked for; name fewer tokens, or those of fewer positions, in one"
            " request, or ask a sampler with backend torch"
        )


def ranked(positions: Sequence[Sequence[Entry] | None]) -> list[Ranked]:
    """Read the best entries of each position; one that has none has an empty list."""
    return [[(token, logprob) for logprob, token, *_ in entries or ()] for entries in positions]


def cached_tokens(meta: Json) -> int:
    """Return how many of a prompt's tokens SGLang found in its cache (of `meta_info`)."""
    return int(meta.get("cached_tokens", 0))
