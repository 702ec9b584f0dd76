"""Limits and options of a torch sampler."""

from typing import Literal, Protocol


class Capacity(Protocol):
    """The bounds on a sampler's work; see `SamplerConfig`, which is a head's."""

    @property
    def sampled_logprobs(self) -> Literal["model", "tempered"]:
        """Distribution of the logprobs that are returned with drawn tokens."""

    @property
    def max_running_sequences(self) -> int:
        """Sequences decoded together."""

    @property
    def prefill_chunk_tokens(self) -> int:
        """Prompt tokens computed between two decoding steps of the other sequences."""

    @property
    def max_cached_tokens(self) -> int:
        """Tokens whose keys and values are kept for the sequences that are drawn together."""
