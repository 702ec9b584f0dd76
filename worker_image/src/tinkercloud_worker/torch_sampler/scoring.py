"""Scores prompts from the hidden states of their prefill.

The logits of a prompt exist for a few positions at a time, until the requested scores are computed.
Position i is scored with the logits of position i - 1.

Shape legend: P prompt tokens, R rows scored at a time, V vocabulary, K targets per position, k top
or sampled tokens per position.
"""

import numpy as np
import torch
from torch import Tensor

from tinkercloud_protocol.requests.tensors import (
    EMPTY_TOP_LOGPROB,
    EMPTY_TOP_TOKEN,
    PromptScores,
    TopLogprobs,
)
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest
from tinkercloud_worker.torch_sampler.decode.token_choice import (
    SamplingParams,
    filter_logits,
    invert,
    uniform,
)


class PromptScorer:
    """Collects the scores of one request's prompt as its positions are computed."""

    def __init__(self, request: SamplingRequest) -> None:
        self._request = request
        asked = request.prompt_logprobs
        length = len(request.prompt)
        self._first = asked.first_position
        self._logprobs = np.full(length, np.nan, np.float32)
        self._top_ids = np.full((length, asked.top_k), EMPTY_TOP_TOKEN, np.int32)
        self._top_logprobs = np.full((length, asked.top_k), EMPTY_TOP_LOGPROB, np.float32)
        shape = asked.targets.shape if asked.targets is not None else (0, 0)
        self._targets = np.zeros(shape, np.float32)
        self._alternatives = np.zeros((length - 1, asked.alternatives_k), np.int64)
        self._alternative_logprobs = np.zeros((length - 1, asked.alternatives_k), np.float32)

    @property
    def first_needed(self) -> int | None:
        """The first position whose hidden state is needed; None if no scores are requested."""
        return None if self._first is None else self._first - 1

    def add(self, first: int, logits_RV: Tensor) -> None:
        """Add the logits of positions first, first + 1, ..., which score the next positions."""
        count = min(len(logits_RV), len(self._request.prompt) - 1 - first)
        if count <= 0:
            return
        scored = slice(first + 1, first + 1 + count)
        logits_RV = logits_RV[:count]
        logprobs_RV = torch.log_softmax(logits_RV, 1)
        self._add_logprobs(scored, logprobs_RV)
        self._add_targets(scored, logprobs_RV)
        self._add_alternatives(scored, logits_RV, logprobs_RV)

    def _add_logprobs(self, scored: slice, logprobs_RV: Tensor) -> None:
        asked = self._request.prompt_logprobs
        start = asked.logprobs_from if asked.logprobs_from is not None else 1
        skip = max(start - scored.start, 0)
        scored = slice(scored.start + skip, scored.stop)
        if scored.start >= scored.stop:
            return
        rows_RV = logprobs_RV[skip:]
        if asked.logprobs_from is not None:
            tokens_R1 = torch.from_numpy(self._request.prompt[scored, None].astype(np.int64))
            chosen_R1 = rows_RV.gather(1, tokens_R1.to(rows_RV.device))
            self._logprobs[scored] = chosen_R1[:, 0].cpu().numpy()
        if asked.top_k:
            top = torch.topk(rows_RV, min(asked.top_k, rows_RV.shape[1]), dim=1)
            self._top_ids[scored, : top.indices.shape[1]] = top.indices.cpu().numpy()
            self._top_logprobs[scored, : top.indices.shape[1]] = top.values.cpu().numpy()

    def _add_targets(self, scored: slice, logprobs_RV: Tensor) -> None:
        targets = self._request.prompt_logprobs.targets
        if targets is None:
            return
        rows = slice(scored.start - 1, scored.stop - 1)
        ids_RK = torch.from_numpy(targets[rows].copy()).to(logprobs_RV.device)
        values_RK = logprobs_RV.gather(1, ids_RK.clamp(min=0))
        self._targets[rows] = values_RK.masked_fill(ids_RK < 0, 0.0).cpu().numpy()

    def _add_alternatives(self, scored: slice, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        request, k = self._request, self._request.prompt_logprobs.alternatives_k
        for row, position in enumerate(range(scored.start, scored.stop) if k else ()):
            if request.temperature == 0.0:
                ids_k = logits_RV[row].argmax().repeat(k)
            else:
                policy = SamplingParams(request.temperature, top_k=0, top_p=1.0)
                probs_V = torch.softmax(filter_logits(logits_RV[row], policy), 0)
                numbers_k = [
                    uniform(request.seed, 0, position, candidate + 1) for candidate in range(k)
                ]
                numbers = torch.tensor(numbers_k, dtype=torch.float64, device=probs_V.device)
                ids_k = invert(probs_V.expand(k, -1), numbers)
            self._alternatives[position - 1] = ids_k.cpu().numpy()
            self._alternative_logprobs[position - 1] = logprobs_RV[row][ids_k].cpu().numpy()

    def finish(self, cached_tokens: int) -> PromptScores:
        """Return the requested scores."""
        asked = self._request.prompt_logprobs
        return PromptScores(
            logprobs=self._logprobs if asked.logprobs_from is not None else None,
            top=TopLogprobs(self._top_ids, self._top_logprobs) if asked.top_k else None,
            targets=self._targets if asked.targets is not None else None,
            alternatives=(
                (self._alternatives, self._alternative_logprobs) if asked.alternatives_k else None
            ),
            cached_tokens=cached_tokens,
        )
