"""The interface to an inference server, whatever program it is.

A dialect translates our requests into one program's API, and its answers back. It does not decide
what a server holds, nor which server is asked: `server` and `sampler` do.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import (
    EMPTY_TOP_LOGPROB,
    EMPTY_TOP_TOKEN,
    PromptScores,
    TopLogprobs,
)
from tinkercloud_worker.engine.sampler import SamplingRequest, SamplingResult
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.weights_folder import SavedWeights

SEED_MASK = (1 << 62) - 1
"""Seeds that leave room for adding a sample's index within 63 bits."""

_ALL_TOKENS = 1 << 30
"""A top_k that no vocabulary reaches, and that 32 bits hold."""

Ranked = Sequence[tuple[int, float]]
"""Token ids and logprobs at one position, the most likely first."""


class Dialect(Protocol):
    """How one program is asked. Methods raise ServerError when the server fails."""

    client: InferenceClient

    async def check_health(self) -> None:
        """Return if the server would answer requests now."""

    async def check_model(self) -> None:
        """Return if the server holds the base model.

        Raises:
            ServerError: it holds another; the message names both.
        """

    async def load_adapter(self, adapter: SavedWeights) -> None:
        """Load a PEFT adapter under its name. It may be loaded already.

        Raises:
            InvalidRequest: the server does not take such an adapter, for its rank or its layers.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. It may be unknown."""

    async def draw(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """Draw the request's samples, sample k with seed + k; the prompt's questions are ignored.

        The result says how many tokens of the prompt the server found in its cache.

        Raises:
            InvalidRequest: the server can't draw like this.
            NotThere: the server does not hold the adapter.
        """

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """Answer the questions about the prompt.

        Raises:
            InvalidRequest: the server can't answer one of them.
            NotThere: the server does not hold the adapter.
        """


def refuse_alternatives(request: SamplingRequest) -> None:
    """Refuse to draw other tokens at the prompt's positions, which no server offers.

    Raises:
        InvalidRequest: the request asks for them.
    """
    if request.prompt_logprobs.alternatives_k:
        raise InvalidRequest(
            "prompt_alt_tokens_k: this model's sampler is an inference server, which does not draw"
            " at positions of the prompt; leave it out, or ask a sampler with backend torch"
        )


def bounded_top_k(top_k: int) -> int:
    """Return a top_k that a server can count to: servers end over numbers of more than 32 bits.

    Args:
        top_k: 0 for all tokens, as in a request.
    """
    return top_k if top_k < _ALL_TOKENS else 0


def top_logprobs(positions: Sequence[Ranked], k: int) -> TopLogprobs:
    """Return the top k logprobs of each position as one table; missing entries stay empty."""
    ids = np.full((len(positions), k), EMPTY_TOP_TOKEN, np.int32)
    values = np.full((len(positions), k), EMPTY_TOP_LOGPROB, np.float32)
    for row, ranked in enumerate(positions):
        for column, (token, logprob) in enumerate(ranked):
            ids[row, column], values[row, column] = token, logprob
    return TopLogprobs(ids, values)
