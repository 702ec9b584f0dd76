"""From logits to tokens: pure functions, one uniform number per token.

A token is drawn by inverting the cumulative distribution at a number that depends only on the
request's seed, the sample's index and the position (a counter-based generator, Philox). So what is
drawn does not depend on what else runs in the batch.

Shape legend: B rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1


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
        seed: of the request; sample k of it draws as if the seed were seed + k.
        sample: index among the request's samples.
        position: index of the token in its sequence.
        draw: index among several draws at one position.
    """
    generator = np.random.Philox(key=(seed + sample) & _MASK, counter=[position, draw, 0, 0])
    return float(np.random.Generator(generator).random())


def filter_logits(logits_V: Tensor, policy: Policy) -> Tensor:
    """Return temperature-scaled logits with excluded tokens at minus infinity.

    The order is temperature, top-k, top-p, as in transformers and vLLM. The most likely token is
    never excluded.
    """
    scaled_V = logits_V / policy.temperature
    if not policy.is_filtered:
        return scaled_V
    k = min(policy.top_k or len(scaled_V), len(scaled_V))
    ranked_k, order_k = torch.topk(scaled_V, k)
    if policy.top_p < 1.0:
        probs_k = torch.softmax(ranked_k, 0)
        before_k = probs_k.cumsum(0) - probs_k
        ranked_k = ranked_k.masked_fill(before_k >= policy.top_p, -torch.inf)
    return torch.full_like(scaled_V, -torch.inf).scatter_(0, order_k, ranked_k)


def draw(logits_BV: Tensor, policies: list[Policy], uniforms: list[float]) -> Tensor:
    """Draw one token for each row.

    Args:
        logits_BV: float32, of the model itself.
        policies: how each row draws.
        uniforms: the number that decides each row.

    Returns:
        int64 [B] token ids.
    """
    tokens_B = logits_BV.argmax(1)
    rows = [row for row, policy in enumerate(policies) if not policy.is_greedy]
    if rows:
        scaled_BV = torch.stack([filter_logits(logits_BV[row], policies[row]) for row in rows])
        numbers = [uniforms[row] for row in rows]
        numbers_B = torch.tensor(numbers, dtype=torch.float64, device=logits_BV.device)
        tokens_B[rows] = invert(torch.softmax(scaled_BV, 1), numbers_B)
    return tokens_B


def invert(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulative probability exceeds the number."""
    cumulative_BV = probs_BV.cumsum(1, dtype=torch.float64)
    thresholds_B1 = (numbers_B * cumulative_BV[:, -1]).unsqueeze(1)
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(1)
    # Rounding may point past the last token that has any probability at all.
    last_B = probs_BV.shape[1] - 1 - (probs_BV.flip(1) > 0).to(torch.int8).argmax(1)
    return torch.minimum(tokens_B, last_B)
