"""From logits to tokens: pure functions, one uniform number per token.

A token is sampled by inverting the cumulative distribution at a number that depends only on the
request's seed, the sample's index and the position (Philox, a counter-based generator). The result
therefore does not depend on what else runs in the batch.

Shape legend: B rows, V vocabulary, k candidate tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled from a distribution."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0


def uniform(seed: int, sample: int, position: int, candidate: int = 0) -> float:
    """Return the number in [0, 1) that decides one token.

    Args:
        seed: the request's seed, from 0 to 2**64 - 1.
        sample: index among the request's samples.
        position: index of the token in its sequence.
        candidate: index among several tokens sampled at one position.
    """
    # The counter holds all but the seed, so samples with different seeds share no numbers.
    generator = np.random.Philox(key=seed, counter=[position, candidate, sample, 0])
    return float(np.random.Generator(generator).random())


def filter_logits(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Return temperature-scaled logits with excluded tokens at minus infinity, for any rows.

    The order is temperature, min-p, top-k, top-p, as in vLLM. The most likely token is never
    excluded.
    """
    scaled_BV = logits_BV / params.temperature
    if params.min_p > 0.0:
        least_B1 = scaled_BV.amax(-1, keepdim=True) + math.log(params.min_p)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    if params.top_k <= 0 and params.top_p >= 1.0:
        return scaled_BV
    vocab_size = scaled_BV.shape[-1]
    ranked_Bk, order_Bk = torch.topk(scaled_BV, min(params.top_k or vocab_size, vocab_size))
    if params.top_p < 1.0:
        probs_Bk = torch.softmax(ranked_Bk, -1)
        before_Bk = probs_Bk.cumsum(-1) - probs_Bk
        ranked_Bk = ranked_Bk.masked_fill(before_Bk >= params.top_p, -torch.inf)
    return torch.full_like(scaled_BV, -torch.inf).scatter_(-1, order_Bk, ranked_Bk)


def sample_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Sample one token for each row.

    Args:
        logits_BV: the model's own logits, float32.
        params: the sampling parameters of each row.
        uniforms: the number that decides each row.

    Returns:
        int64 [B] token ids.
    """
    # The transfer overlaps with the computation of the logits.
    numbers_B = torch.tensor(uniforms, dtype=torch.float64).to(logits_BV.device, non_blocking=True)
    first, *others = dict.fromkeys(params)
    if not others:
        return _sample_alike(logits_BV, first, numbers_B)
    tokens_B = logits_BV.new_empty(len(params), dtype=torch.int64)
    for shared in (first, *others):
        rows = [row for row, each in enumerate(params) if each == shared]
        tokens_B[rows] = _sample_alike(logits_BV[rows], shared, numbers_B[rows])
    return tokens_B


def _sample_alike(logits_BV: Tensor, params: SamplingParams, numbers_B: Tensor) -> Tensor:
    """Sample one token for each row, all with the same parameters."""
    if params.is_greedy:
        return logits_BV.argmax(1)
    return invert(torch.softmax(filter_logits(logits_BV, params), 1), numbers_B)


def invert(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulative probability exceeds the number."""
    cumulative_BV = probs_BV.cumsum(1, dtype=torch.float64)
    thresholds_B1 = (numbers_B * cumulative_BV[:, -1]).unsqueeze(1)
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(1)
    # Rounding may point past the last token with a non-zero probability.
    last_B = probs_BV.shape[1] - 1 - (probs_BV.flip(1) > 0).to(torch.int8).argmax(1)
    return torch.minimum(tokens_B, last_B)
