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

from tinkercloud_protocol.tensors import Int32Array, PromptScores, SampledSequence
from tinkercloud_worker.engine.trainer import Publication, WeightsSnapshot


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends, other than by its length."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobParams:
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
    prompt_logprobs: PromptLogprobParams = field(default_factory=PromptLogprobParams)

    @property
    def num_positions(self) -> int:
        """Tokens that are read at most: the last one drawn never is."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of its prompt and of the token ids to score."""
        targets = self.prompt_logprobs.targets
        return self.prompt.nbytes + (targets.nbytes if targets is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingResult:
    """The result of a request."""

    sequences: Sequence[SampledSequence]
    prompt: PromptScores


class Sampler(Protocol):
    """Draws continuations. Methods raise InvalidRequest for what the client got wrong."""

    async def publish(self, version: str, weights: Publication | None) -> None:
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

    def release_caches(self) -> None:
        """Free memory that only makes the next requests faster. Called on the engine's thread."""

    async def close(self) -> None:
        """Release what would outlive this process, within seconds. Running requests fail."""
