"""Continuous batching: sequences join and leave between two steps of one running batch.

A `DecodingBatch` owns the key-value slots of all sequences that share one module's weights: the
base with any mixture of adapters, or one fully fine-tuned model. Each step runs one pass over one
new position of every sequence. The module knows nothing of requests, queues or threads.

Shape legend: B running sequences, T new positions, L positions, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.payloads import SampledSequence, TopLogprobs
from tinkercloud_worker.base_model import ActiveWeights, BaseModel, Route
from tinkercloud_worker.engine.sampler import SamplingRequest
from tinkercloud_worker.torch_sampler.cache import KeyValues, PrefillCache, SlotCache
from tinkercloud_worker.torch_sampler.drawing import Policy, draw, uniform

_STOP_WINDOW_TOKENS = 8
"""Tokens decoded beyond the length of the longest stop string: some tokens are part of a letter."""


@dataclass(slots=True, eq=False)
class Running:
    """One sequence being drawn."""

    request: SamplingRequest
    index: int
    """Which of the request's samples it is."""
    weights: ActiveWeights | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stopped: bool = False

    @property
    def policy(self) -> Policy:
        """How its tokens are drawn."""
        request = self.request
        return Policy(request.temperature, request.top_k, request.top_p)

    @property
    def position(self) -> int:
        """Where its newest token stands."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def is_done(self) -> bool:
        """Whether a stop rule or its length limit has ended it."""
        return self.stopped or len(self.tokens) >= self.request.max_tokens

    def result(self) -> SampledSequence:
        """Return what was drawn."""
        top = None
        if self.request.top_logprobs:
            top = TopLogprobs(
                np.stack([ids.cpu().numpy().astype(np.int32) for ids, _ in self.top]),
                np.stack([values.cpu().numpy() for _, values in self.top]),
            )
        return SampledSequence(self.tokens, self.logprobs, self.stopped, top)


class Drawer:
    """Takes logits to the next token of sequences, and notices when one ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def extend(self, sequences: Sequence[Running], logits_BV: Tensor) -> None:
        """Draw one token for each sequence from its row of logits."""
        uniforms = [uniform(s.request.seed, s.index, s.position + 1) for s in sequences]
        tokens_B = draw(logits_BV, [s.policy for s in sequences], uniforms)
        chosen_B = logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        logprobs_B = chosen_B - logits_BV.logsumexp(1)
        tokens, logprobs = tokens_B.tolist(), logprobs_B.tolist()
        for row, sequence in enumerate(sequences):
            sequence.tokens.append(tokens[row])
            sequence.logprobs.append(logprobs[row])
            if sequence.request.top_logprobs:
                row_logprobs_V = torch.log_softmax(logits_BV[row], 0)
                top = torch.topk(row_logprobs_V, sequence.request.top_logprobs)
                sequence.top.append((top.indices, top.values))
            sequence.stopped = self._has_stopped(sequence)

    def _has_stopped(self, sequence: Running) -> bool:
        stop = sequence.request.stop
        if sequence.tokens[-1] in stop.token_ids:
            return True
        if not stop.strings:
            return False
        window = max(map(len, stop.strings)) + _STOP_WINDOW_TOKENS
        text = str(self._tokenizer.decode(sequence.tokens[-window:]))
        return any(string in text for string in stop.strings)


class Masks:
    """Attention masks of a decoding step, in the form the base model's architecture wants."""

    def __init__(self, base: BaseModel) -> None:
        config = base.config
        self._kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        window = getattr(config, "sliding_window", None)
        if not self._kinds:
            self._kinds = ["sliding_attention" if window else "full_attention"]
        self._window = int(window) if window else 0

    def of(self, positions_B: Tensor, length: int) -> object:
        """Return which of `length` cached positions each row's new position may attend to.

        A boolean tensor [B, 1, 1, L], or one for each kind of layer where a model has several.
        """
        query_B1 = positions_B.unsqueeze(1)
        key_L = torch.arange(length, device=positions_B.device)
        causal_BL = key_L <= query_B1
        masks = {}
        for kind in self._kinds:
            recent_BL = key_L > query_B1 - self._window
            mask_BL = causal_BL & recent_BL if kind == "sliding_attention" else causal_BL
            masks[kind] = mask_BL[:, None, None]
        return masks if len(masks) > 1 else masks[self._kinds[0]]


class DecodingBatch:
    """The running sequences of one module's weights."""

    def __init__(self, base: BaseModel, drawer: Drawer) -> None:
        self._base = base
        self._drawer = drawer
        self._masks = Masks(base)
        self._num_layers = int(base.config.num_hidden_layers)
        self._cache = SlotCache(self._num_layers)
        self.sequences: list[Running] = []
        """One for each slot, without gaps."""

    def prefill(
        self, cache: PrefillCache, tokens: Sequence[int], start: int, weights: ActiveWeights | None
    ) -> Tensor:
        """Read tokens at positions start, start + 1, ...; return their hidden states [T, D]."""
        device = self._base.device
        ids_BT = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
        positions_BT = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
        with torch.no_grad():
            hidden_BTD = self._base.hidden(
                ids_BT, [Route(slice(None), weights)], position_ids_BT=positions_BT, cache=cache
            )
        return hidden_BTD[0]

    def new_prefill_cache(self, capacity: int, prefix: KeyValues) -> PrefillCache:
        """Return an empty cache for one prompt, or one begun by a known prefix."""
        return PrefillCache(self._num_layers, capacity, prefix)

    def join(self, sequence: Running, prompt: KeyValues) -> None:
        """Give a sequence, whose first token is drawn, a slot that holds its prompt."""
        self._cache.insert(len(self.sequences), prompt)
        self.sequences.append(sequence)

    def step(self) -> list[Running]:
        """Draw one token for every sequence; return those that ended, which have left."""
        device = self._base.device
        positions = [sequence.position for sequence in self.sequences]
        positions_B = torch.tensor(positions, device=device)
        self._cache.begin_step(positions_B, max(positions) + 1)
        ids_BT = torch.tensor([[sequence.tokens[-1]] for sequence in self.sequences], device=device)
        routes = _routes(self.sequences)
        with torch.no_grad():
            hidden_BTD = self._base.hidden(
                ids_BT,
                routes,
                position_ids_BT=positions_B.unsqueeze(1),
                attention_mask=self._masks.of(positions_B, self._cache.read_length),
                cache=self._cache,
            )
            logits_BV = self._base.logits(hidden_BTD[:, 0], routes)
        self._drawer.extend(self.sequences, logits_BV)
        return self._remove([sequence for sequence in self.sequences if sequence.is_done])

    def leave(self, sequences: Sequence[Running]) -> None:
        """Give up sequences nobody waits for."""
        self._remove([sequence for sequence in sequences if sequence in self.sequences])

    def _remove(self, leaving: list[Running]) -> list[Running]:
        for sequence in leaving:
            slot, last = self.sequences.index(sequence), len(self.sequences) - 1
            if slot != last:
                self._cache.move(last, slot, self.sequences[last].position + 1)
                self.sequences[slot] = self.sequences[last]
            self.sequences.pop()
        if not self.sequences:
            self._cache.clear()
        return leaving


def _routes(sequences: Sequence[Running]) -> list[Route]:
    routes, start = [], 0
    for _, group in groupby(sequences, key=lambda sequence: id(sequence.weights)):
        members = list(group)
        routes.append(Route(slice(start, start + len(members)), members[0].weights))
        start += len(members)
    return routes
