"""Limits and options of a torch sampler."""

from typing import Literal, Protocol


class Capacity(Protocol):
    """Limits of a sampler; `SamplerConfig` of a session head provides them."""

    @property
    def sampled_logprobs(self) -> Literal["model", "tempered"]:
        """The distribution of the logprobs returned with sampled tokens."""

    @property
    def max_running_sequences(self) -> int:
        """Maximum number of sequences decoded together."""

    @property
    def prefill_chunk_tokens(self) -> int:
        """Maximum prompt tokens prefilled between two decoding steps of running sequences."""

    @property
    def max_cached_tokens(self) -> int:
        """Maximum tokens in the KV cache of the sequences decoded together."""
