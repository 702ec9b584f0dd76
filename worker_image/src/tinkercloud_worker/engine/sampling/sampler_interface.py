"""The interface of a sampler: sample from immutable, named versions of a model's weights.

A version is published once under a unique name, and keeps its weights until it is retired, whatever
the trainer does meanwhile. Methods are coroutines of the head's event loop; cancelling `sample`
aborts the request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.tensors import Int32Array, PromptScores, SampledSequence
from tinkercloud_worker.engine.sampling.token_grammar import TokenGrammar
from tinkercloud_worker.engine.trainer import Publication, WeightsCopy
from tinkercloud_worker.engine.turns.usage_counts import NOBODY, Payer, Usage
from tinkercloud_worker.vision.prepared import PreparedImage


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of a sample that is not finished."""

    index: int
    """Index of the sample in its request."""
    token: int
    logprob: float
    top: tuple[Sequence[int], Sequence[float]] | None
    """The most likely tokens at its position and their logprobs, if they were asked for."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence, other than its length."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """How logits are changed before a token is sampled; see `sampling.LogitParams`."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""


UNCHANGED = LogitChanges()


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobParams:
    """Which logprobs of the prompt, a sequence of P tokens, a request asks for."""

    logprobs_from: int | None = None
    """First position to return the logprob of (at least 1); None for none."""
    top_k: int = 0
    """Most likely tokens to return for each position from `logprobs_from`, or 1 if that is None."""
    targets: npt.NDArray[np.int64] | None = None
    """Token ids to score, [P - 1, K]; row i belongs to position i + 1, and -1 is padding."""
    alternatives_k: int = 0
    """Alternative tokens to sample at each position after the first."""

    @property
    def first_position(self) -> int | None:
        """The first position that must be scored; None if there is none."""
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
    """A validated asample request."""

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
    """Most likely tokens to return for each sampled position."""
    prompt_logprobs: PromptLogprobParams = field(default_factory=PromptLogprobParams)
    payer: Payer = NOBODY
    """Who sent it, and for which model."""
    on_token: Callable[[SampledToken], None] | None = None
    """Called for each token as soon as it is sampled, from any thread; samplers that receive whole
    sequences never call it."""
    changes: LogitChanges = UNCHANGED
    min_p: float = 0.0
    """Minimum probability of a token, relative to the likeliest; 0 for all."""
    grammar: TokenGrammar | None = None
    """The form that the text of each sample must have."""
    images: tuple[PreparedImage, ...] = ()
    """The images of the prompt, whose placeholder tokens it contains."""

    @property
    def owner(self) -> str:
        """Who sent it: requests of different owners take turns."""
        return self.payer.owner

    def sent_by(self, payer: Payer) -> "SamplingRequest":
        """Return the same request with who pays for it."""
        return replace(self, payer=payer)

    @property
    def only_scores(self) -> bool:
        """Whether it is about the logprobs of its prompt, and samples a token as it has to."""
        return self.max_tokens == 1 and self.prompt_logprobs.first_position is not None

    @property
    def num_positions(self) -> int:
        """Maximum number of tokens the model reads: never the last sampled one."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the prompt, its images, and the token ids to score."""
        targets = self.prompt_logprobs.targets
        pixels = sum(image.pixels.nbytes for image in self.images)
        return self.prompt.nbytes + pixels + (targets.nbytes if targets is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingResult:
    """The result of a sampling request."""

    sequences: Sequence[SampledSequence]
    prompt: PromptScores

    def usage(self, num_prompt_tokens: int) -> Usage:
        """Return the tokens of the request, whose prompt counts once for all samples."""
        cached = self.prompt.cached_tokens
        return Usage(
            prefill_tokens=num_prompt_tokens - cached,
            cached_tokens=cached,
            sampled_tokens=sum(len(sequence.tokens) for sequence in self.sequences),
        )


class EngineScaler(Protocol):
    """Says how many engines a sampler needs."""

    async def needed(self, engines: int) -> int:
        """Return how many engines are needed, once that is not `engines`, the number that exist.

        Returns the same number after `engine_scaling.HOLD_SECONDS`. If fewer are returned, the
        surplus ones have no request left, and get no other until a later call counts them again.
        """


class Sampler(Protocol):
    """Samples continuations. Methods raise InvalidRequest for errors of the client."""

    async def publish(self, version: str, weights: Publication | None) -> None:
        """Make weights (None: the base model) available under a new name."""

    async def retire(self, version: str) -> None:
        """Remove a version, which may be unknown. Its running requests finish."""

    async def export(self, version: str) -> WeightsCopy | None:
        """Return the weights of a version; None means the base model.

        Raises:
            NotFound: the version is unknown.
        """

    async def sample(self, version: str, request: SamplingRequest) -> SamplingResult:
        """Sample `num_samples` continuations and score the prompt as requested.

        Raises:
            NotFound: the version is unknown.
        """

    def release_caches(self) -> None:
        """Free memory that only speeds up later requests. Called on the engine's thread."""

    async def close(self) -> None:
        """Release, within seconds, what would outlive this process. Running requests fail."""
