"""Sequences that are computed one by one, for models whose steps can't be computed in slots.

Each keeps one of transformers' own caches, of whatever kind its model has: recurrent states, an
indexer's keys. If that computes wrongly too, each token takes a pass over its whole sequence, as
the trainer computes it.

Shape legend: B running sequences, T new positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tinkercloud_worker.device.packing import PackedSequences
from tinkercloud_worker.lora.segments import ActiveWeights, route_all
from tinkercloud_worker.model.base_model import BaseModel
from tinkercloud_worker.torch_sampler.cache import KeyValues, PrefillCache
from tinkercloud_worker.torch_sampler.decoding import Running, TokenSampler

NewCache = Callable[[], Cache | None]
"""Returns a cache for one sequence that holds nothing yet, or None, for models that have none."""


class UnbatchedDecoding:
    """Running sequences with any weights, computed one by one. Has `DecodingBatch`'s methods."""

    def __init__(self, base: BaseModel, token_sampler: TokenSampler, new_cache: NewCache) -> None:
        """Make a batch without sequences."""
        self._base = base
        self._token_sampler = token_sampler
        self._new_cache = new_cache
        self._caches: dict[Running, Cache] = {}
        self.sequences: list[Running] = []
        """In the order they came in."""

    def new_prefill_cache(self, capacity: int, prefix: KeyValues) -> PrefillCache:
        """Return a cache that stays empty: samples can't share what a prompt leaves behind."""
        del prefix
        return PrefillCache(0, capacity)

    def prefill(
        self, cache: PrefillCache, tokens: Sequence[int], start: int, weights: ActiveWeights | None
    ) -> Tensor:
        """Read a whole prompt; return its hidden states [T, D]."""
        del cache, start
        return self._read(tokens, weights, None)

    def join(self, sequence: Running, prompt: KeyValues) -> None:
        """Take a sequence whose first token is drawn; its first step reads its prompt again."""
        del prompt
        self.sequences.append(sequence)

    def tokens_with(self, joining: Sequence[Running]) -> int:
        """Return the positions that sequences will take in the end, if some join those here."""
        return sum(each.longest for each in (*self.sequences, *joining))

    def step(self) -> list[Running]:
        """Draw one token for every sequence; return those that ended, which have left."""
        logits = [
            self._base.logits(hidden_D[None], route_all(sequence.weights))
            for sequence, hidden_D in zip(self.sequences, self.hidden(), strict=True)
        ]
        self._token_sampler.extend(self.sequences, torch.cat(logits))
        ended = [sequence for sequence in self.sequences if sequence.is_done]
        self.leave(ended)
        return ended

    def hidden(self) -> Tensor:
        """Return the hidden states [B, D] of every sequence's newest token."""
        return torch.stack([self._newest(sequence) for sequence in self.sequences])

    def _newest(self, sequence: Running) -> Tensor:
        cache, position = self._caches.get(sequence), sequence.position
        # The rotary positions of all that were read before are others from here on.
        if cache is None or position == self._base.rotary_switch:
            cache = self._new_cache()
            tokens = [*sequence.request.prompt.tolist(), *sequence.tokens]
            hidden_TD = self._read(tokens, sequence.weights, cache)
            if cache is not None:
                self._caches[sequence] = cache
            return hidden_TD[-1]
        device = self._base.device
        with torch.no_grad():
            hidden_1TD = self._base.hidden(
                torch.tensor([sequence.tokens[-1:]], device=device),
                route_all(sequence.weights),
                position_ids_BT=torch.tensor([[position]], device=device),
                cache=cache,
            )
        return hidden_1TD[0, -1]

    def _read(
        self, tokens: Sequence[int], weights: ActiveWeights | None, cache: Cache | None
    ) -> Tensor:
        ids_R = torch.tensor(list(tokens), dtype=torch.int64, device=self._base.device)
        with torch.no_grad():
            return self._base.hidden_of(
                PackedSequences(ids_R, (len(ids_R),)), route_all(weights), cache=cache
            )

    def leave(self, sequences: Sequence[Running]) -> None:
        """Remove sequences that ended, or that nobody waits for."""
        for sequence in sequences:
            if sequence in self.sequences:
                self.sequences.remove(sequence)
                self._caches.pop(sequence, None)
