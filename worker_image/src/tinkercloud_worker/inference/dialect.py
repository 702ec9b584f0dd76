"""The interface to an inference server, independent of its program.

A dialect translates requests into the API of one program, and responses back. What a server loads,
and which server gets a request, is decided by `inference_server` and `sampler`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tinkercloud_protocol.requests.tensors import (
    EMPTY_TOP_LOGPROB,
    EMPTY_TOP_TOKEN,
    PromptScores,
    TopLogprobs,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, SamplingResult
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.weights_folder import SavedWeights

SEED_MASK = (1 << 62) - 1
"""Mask of seeds, so that adding a sample's index stays within 63 bits."""

_ALL_TOKENS = 1 << 30
"""A top_k larger than any vocabulary that fits in 32 bits."""

Ranked = Sequence[tuple[int, float]]
"""Token ids and logprobs at one position, the most likely first."""


class Dialect(Protocol):
    """The API of one program. Methods raise ServerError when the server fails."""

    client: InferenceClient

    async def check_health(self) -> None:
        """Return if the server is healthy; raise ServerError if not."""

    async def check_model(self) -> None:
        """Check that the server has the base model.

        Raises:
            ServerError: it has another model; the message names both.
        """

    async def load_adapter(self, adapter: SavedWeights) -> None:
        """Load a PEFT adapter under its name, unless it is loaded.

        Raises:
            InvalidRequest: the server does not support its rank or its layers.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, which may be unknown."""

    async def sample(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """Sample the request's sequences, number k with seed + k, without scoring the prompt.

        The result has the number of prompt tokens that the server found in its cache.

        Raises:
            InvalidRequest: the server does not support the sampling parameters.
            NotThere: the server does not have the adapter.
        """

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """Score the prompt as requested.

        Raises:
            InvalidRequest: the server does not support one of the parameters.
            NotThere: the server does not have the adapter.
        """


def reject_alternatives(request: SamplingRequest) -> None:
    """Reject a request for alternative tokens in the prompt, which no server supports.

    Raises:
        InvalidRequest: the request asks for them.
    """
    if request.prompt_logprobs.alternatives_k:
        raise InvalidRequest(
            "prompt_alt_tokens_k: not supported, since this model's sampler is an inference server;"
            " leave it out, or use a sampler with backend torch"
        )


def reject_images(request: SamplingRequest, server: str) -> None:
    """Reject a prompt with images.

    Args:
        request: the request.
        server: name of the program that does not receive them.

    Raises:
        InvalidRequest: the prompt has images.
    """
    if request.images:
        raise InvalidRequest(
            f"prompt: images are not supported, because this model's sampler is {server}; use a"
            " sampler with backend torch or sglang"
        )


def reject_grammars(request: SamplingRequest, server: str) -> None:
    """Reject a request whose samples must have a form.

    Args:
        request: the request.
        server: name of the program that is not asked for it.

    Raises:
        InvalidRequest: the request needs a grammar.
    """
    if request.grammar is not None and request.grammar.is_needed:
        raise InvalidRequest(
            "response_format, tool_choice, parallel_tool_calls, strict: answers can't be"
            f" constrained, because this model's sampler is {server}; leave these fields out, or"
            " use a sampler with backend torch or sglang"
        )


def bounded_top_k(top_k: int) -> int:
    """Return a top_k that fits in 32 bits: servers crash on larger numbers.

    Args:
        top_k: the value of the request; 0 for all tokens.
    """
    return top_k if top_k < _ALL_TOKENS else 0


def top_logprobs(positions: Sequence[Ranked], k: int) -> TopLogprobs:
    """Return the top k logprobs of each position as arrays; missing entries stay empty."""
    ids = np.full((len(positions), k), EMPTY_TOP_TOKEN, np.int32)
    values = np.full((len(positions), k), EMPTY_TOP_LOGPROB, np.float32)
    for row, ranked in enumerate(positions):
        for column, (token, logprob) in enumerate(ranked):
            ids[row, column], values[row, column] = token, logprob
    return TopLogprobs(ids, values)
