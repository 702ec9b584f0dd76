"""Penalties and biases of one sequence, applied to its logits before a token is sampled.

Shape legend: V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud_worker.engine.sampling.sampler_interface import LogitChanges


class ChangedLogits:
    """Changes the logits of one sequence, and counts its tokens for that on their device."""

    def __init__(self, changes: LogitChanges, prompt: Sequence[int], like_V: Tensor) -> None:
        """Start before the first token.

        Args:
            changes: the changes.
            prompt: the tokens of the prompt.
            like_V: logits, float32; those that are changed have the same shape and device.
        """
        self._changes = changes
        self._bias_V: Tensor | None = None
        if changes.bias:
            tokens, values = zip(*changes.bias, strict=True)
            self._bias_V = torch.zeros_like(like_V)
            self._bias_V[list(tokens)] = torch.tensor(values, device=like_V.device)
        self._counts_V = torch.zeros_like(like_V)
        """How often each token was sampled."""
        self._is_in_prompt_V = torch.zeros_like(like_V, dtype=torch.bool)
        if changes.repetition_penalty != 1.0:
            self._is_in_prompt_V[list(prompt)] = True

    def of(self, logits_V: Tensor) -> Tensor:
        """Return the changed logits."""
        changes = self._changes
        if self._bias_V is not None:
            logits_V = logits_V + self._bias_V
        if changes.repetition_penalty != 1.0:
            factor = changes.repetition_penalty
            less_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            logits_V = torch.where(self._is_in_prompt_V | (self._counts_V > 0), less_V, logits_V)
        if changes.frequency_penalty:
            logits_V = logits_V - changes.frequency_penalty * self._counts_V
        if changes.presence_penalty:
            logits_V = logits_V - changes.presence_penalty * (self._counts_V > 0)
        return logits_V

    def add(self, token: int) -> None:
        """Count a sampled token."""
        self._counts_V[token] += 1
