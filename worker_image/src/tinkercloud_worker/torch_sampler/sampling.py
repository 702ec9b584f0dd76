"""From logits to tokens: pure functions, one uniform number per token.

A token is drawn by inverting the cumulative distribution at a number that depends only on the
request's seed, the sample's index and the position (a counter-based generator, Philox). So what is
drawn does not depend on what else runs in the batch.

Shape legend: B rows, V vocabulary, k tokens that are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Policy:
    """How tokens are drawn from a distribution."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return self.top_k > 0 or self.top_p < 1.0


def uniform(seed: int, sample: int, position: int, draw: int = 0) -> float:
    """Return the number in [0, 1) that decides one token.

    Args:
        seed: of the request, from 0 to 2**64 - 1.
        sample: index among the request's samples.
        position: index of the token in its sequence.
        draw: index among several draws at one position.
    """
    # All but the seed is in the counter: a sample draws nothing that one of another seed draws.
    generator = np.random.Philox(key=seed, counter=[position, draw, sample, 0])
    return float(np.random.Generator(generator).random())


def filter_logits(logits_BV: Tensor, policy: Policy) -> Tensor:
    """Return temperature-scaled logits with excluded tokens at minus infinity, for any rows.

    The order is temperature, top-k, top-p, as in transformers and vLLM. The most likely token is
    never excluded.
    """
    scaled_BV = logits_BV / policy.temperature
    if not policy.is_filtered:
        return scaled_BV
    vocab_size = scaled_BV.shape[-1]
    ranked_Bk, order_Bk = torch.topk(scaled_BV, min(policy.top_k or vocab_size, vocab_size))
    if policy.top_p < 1.0:
        probs_Bk = torch.softmax(ranked_Bk, -1)
        before_Bk = probs_Bk.cumsum(-1) - probs_Bk
        ranked_Bk = ranked_Bk.masked_fill(before_Bk >= policy.top_p, -torch.inf)
    return torch.full_like(scaled_BV, -torch.inf).scatter_(-1, order_Bk, ranked_Bk)


def draw(logits_BV: Tensor, policies: Sequence[Policy], uniforms: Sequence[float]) -> Tensor:
    """Draw one token for each row.

    Args:
        logits_BV: float32, of the model itself.
        policies: how each row draws.
        uniforms: the number that decides each row.

    Returns:
        int64 [B] token ids.
    """
    # On its way while the logits are computed.
    numbers_B = torch.tensor(uniforms, dtype=torch.float64).to(logits_BV.device, non_blocking=True)
    first, *others = dict.fromkeys(policies)
    if not others:
        return _draw_alike(logits_BV, first, numbers_B)
    tokens_B = logits_BV.new_empty(len(policies), dtype=torch.int64)
    for policy in (first, *others):
        rows = [row for row, each in enumerate(policies) if each == policy]
        tokens_B[rows] = _draw_alike(logits_BV[rows], policy, numbers_B[rows])
    return tokens_B


def _draw_alike(logits_BV: Tensor, policy: Policy, numbers_B: Tensor) -> Tensor:
    if policy.is_greedy:
        return logits_BV.argmax(1)
    return invert(torch.softmax(filter_logits(logits_BV, policy), 1), numbers_B)


def invert(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulative probability exceeds the number."""
    cumulative_BV = probs_BV.cumsum(1, dtype=torch.float64)
    thresholds_B1 = (numbers_B * cumulative_BV[:, -1]).unsqueeze(1)
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(1)
    # Rounding may point past the last token that has any probability at all.
    last_B = probs_BV.shape[1] - 1 - (probs_BV.flip(1) > 0).to(torch.int8).argmax(1)
    return torch.minimum(tokens_B, last_B)
