"""Decodes sequences one by one, for models that can't use slots.

Each sequence has its own transformers cache of the kind that the model needs, such as recurrent
states or the keys of an indexer. If that is incorrect too, each token takes a pass over its full
sequence, computed as in the trainer.

Shape legend: B running sequences, T new positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.lora.segments import ActiveWeights, single_segment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.decoding import RunningSequence, TokenSampler
from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues, PrefillCache
from tinkercloud_worker.vision.spans import Images

NewCache = Callable[[], Cache | None]
"""Returns an empty cache for one sequence, or None for models without a usable cache."""


class UnbatchedDecoding:
    """Running sequences with any weights, decoded one by one. Has `DecodingBatch`'s methods."""

    def __init__(
        self, base: TorchBaseModel, token_sampler: TokenSampler, new_cache: NewCache
    ) -> None:
        """Create a batch without sequences."""
        self._base = base
        self._token_sampler = token_sampler
        self._new_cache = new_cache
        self._caches: dict[RunningSequence, Cache] = {}
        self.sequences: list[RunningSequence] = []
        """Running sequences in order of arrival."""

    def new_prefill_cache(self, capacity: int, prefix: KeyValues) -> PrefillCache:
        """Return a cache that stays empty: samples can't share the state after a prompt."""
        del prefix
        return PrefillCache(0, capacity)

    def prefill(
        self,
        cache: PrefillCache,
        tokens: Sequence[int],
        start: int,
        weights: ActiveWeights | None,
        images: Images = (),
    ) -> Tensor:
        """Prefill a full prompt; return its hidden states [T, D]."""
        del cache, start
        return self._read(tokens, weights, None, images)

    def add(self, sequence: RunningSequence, prompt: KeyValues) -> None:
        """Add a sequence after its first token; its first step prefills its prompt again."""
        del prompt
        self.sequences.append(sequence)

    def cache_tokens_with(self, joining: Sequence[RunningSequence]) -> int:
        """Return the positions that all sequences will occupy if more join."""
        return sum(each.longest for each in (*self.sequences, *joining))

    def step(self) -> list[RunningSequence]:
        """Sample one token for every sequence; remove and return the finished ones.

        A sequence that fails ends with the error, and the others continue.
        """
        for sequence in self.sequences:
            try:
                logits_1V = self._base.logits(
                    self._newest(sequence)[None], single_segment(sequence.weights)
                )
                self._token_sampler.extend([sequence], logits_1V)
            except Exception as error:  # noqa: BLE001 - it fails its own request
                sequence.error = error
        ended = [sequence for sequence in self.sequences if sequence.is_done]
        self.abort(ended)
        return ended

    def step_each(self) -> None:
        """Do what `step` does, which computes sequences one after another anyway."""
        self.step()

    def hidden(self) -> Tensor:
        """Return the hidden states [B, D] of every sequence's newest token."""
        return torch.stack([self._newest(sequence) for sequence in self.sequences])

    def _newest(self, sequence: RunningSequence) -> Tensor:
        cache, position = self._caches.get(sequence), sequence.position
        # From this length on, the rotary positions of all earlier tokens change.
        if cache is None or position == self._base.rotary_switch:
            cache = self._new_cache()
            tokens = [*sequence.request.prompt.tolist(), *sequence.tokens]
            hidden_TD = self._read(tokens, sequence.weights, cache, sequence.request.images)
            if cache is not None:
                self._caches[sequence] = cache
            return hidden_TD[-1]
        device = self._base.device
        position += self._base.images.rope_shift(sequence.request.images)
        with torch.no_grad():
            hidden_1TD = self._base.hidden(
                torch.tensor([sequence.tokens[-1:]], device=device),
                single_segment(sequence.weights),
                position_ids_BT=torch.tensor([[position]], device=device),
                cache=cache,
            )
        return hidden_1TD[0, -1]

    def _read(
        self,
        tokens: Sequence[int],
        weights: ActiveWeights | None,
        cache: Cache | None,
        images: Images,
    ) -> Tensor:
        ids_R = torch.tensor(list(tokens), dtype=torch.int64, device=self._base.device)
        with torch.no_grad():
            return self._base.hidden_of(
                PackedSequences(ids_R, (len(ids_R),), (images,)),
                single_segment(weights),
                cache=cache,
            )

    def abort(self, sequences: Sequence[RunningSequence]) -> None:
        """Remove sequences whose requests are done or cancelled."""
        for sequence in sequences:
            if sequence in self.sequences:
                self.sequences.remove(sequence)
                self._caches.pop(sequence, None)
