"""Finds out, when a model is loaded, how its sequences can be decoded.

Slots store keys and values, and the rows of a step are at different positions. A model that stores
other state, or that uses the length of its cache, would decode incorrectly. The check therefore
decodes sequences of different lengths and compares the hidden states with a pass without a cache.
Short sequences suffice: masks are the model's own (`decoding_masks`), and slots raise an error if a
model asks for their length.

Shape legend: S sequences, R positions, D hidden size.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, StopRules
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.self_check import REFUSALS, is_near, scattered_ids
from tinkercloud_worker.torch_sampler.decode.decoding import (
    DecodingBatch,
    RunningSequence,
    TokenSampler,
)
from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues, LayerKeyValues
from tinkercloud_worker.torch_sampler.decode.unbatched import NewCache, UnbatchedDecoding

log = logging.getLogger(__name__)

_PROMPTS = (slice(0, 5), slice(5, 7))
"""Ranges of the checked tokens that serve as prompts."""
_FILLED = 300
"""Positions of another slot, which the checked sequences read and must ignore. Some models store
their own masks, with windows of 256."""
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Decoding:
    """How sequences of a model are decoded."""

    slotted: int
    """Maximum positions of a sequence in a slot; longer sequences are decoded individually."""
    new_cache: NewCache
    """Creates the caches of sequences that are decoded individually."""


def check_decoding(base: TorchBaseModel, token_sampler: TokenSampler) -> Decoding:
    """Return the fastest way of decoding with the same results as without a cache."""
    slotted = base.rotary_switch or base.max_context_length
    if not _is_right(base, lambda: _in_slots(base, token_sampler, slotted)):
        slotted = 0
    if slotted == base.max_context_length:
        return Decoding(slotted, _no_cache)
    own_cache = partial(DynamicCache, config=base.config)
    if _is_right(base, lambda: _unbatched(base, token_sampler, own_cache)):
        log.info("sequences of this model are decoded one by one", extra={"longer_than": slotted})
        return Decoding(slotted, own_cache)
    log.warning(
        "this model gives different results with a KV cache, so each token needs a pass over the"
        " full sequence; an inference server may be faster",
        extra={"model_type": base.config.model_type, "longer_than": slotted},
    )
    return Decoding(slotted, _no_cache)


def _no_cache() -> None:
    return None


def _is_right(base: TorchBaseModel, begin: Callable[[], DecodingBatch | UnbatchedDecoding]) -> bool:
    """Whether the first sequences of a batch have the same results as without a cache.

    Args:
        base: the model.
        begin: returns the batch with its sequences added.
    """
    try:
        batch = begin()
        sequences = batch.sequences[: len(_PROMPTS)]
        drawn_SRD = torch.stack([_step(batch) for _ in range(_STEPS)], 1)
        return all(
            is_near(base, drawn_RD, _expected(base, sequence))
            for sequence, drawn_RD in zip(sequences, drawn_SRD, strict=False)
        )
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        log.debug("this model can't be decoded this way", extra={"error": str(error)})
        return False


def _in_slots(base: TorchBaseModel, token_sampler: TokenSampler, longest: int) -> DecodingBatch:
    """Return a batch of the sequences, prefilled in two chunks, and of a longer one."""
    batch = DecodingBatch(base, token_sampler)
    key_values: KeyValues = ()
    for sequence in _sequences(base):
        prompt = sequence.request.prompt.tolist()
        cache = batch.new_prefill_cache(len(prompt), ())
        batch.prefill(cache, prompt[:1], 0, None)
        batch.prefill(cache, prompt[1:], 1, None)
        key_values = cache.key_values()
        batch.add(sequence, key_values)
    length = min(_FILLED, longest - _STEPS)
    filled = tuple(
        LayerKeyValues(
            layer.keys.new_zeros(len(layer.keys), length, layer.keys.shape[2]),
            layer.values.new_zeros(len(layer.values), length, layer.values.shape[2]),
        )
        for layer in key_values
    )
    batch.add(_running([0] * length, 0), filled)
    return batch


def _unbatched(
    base: TorchBaseModel, token_sampler: TokenSampler, new_cache: NewCache
) -> UnbatchedDecoding:
    batch = UnbatchedDecoding(base, token_sampler, new_cache)
    for sequence in _sequences(base):
        batch.add(sequence, ())
    return batch


def _sequences(base: TorchBaseModel) -> list[RunningSequence]:
    ids = scattered_ids(base).tolist()
    return [_running(ids[part], ids[-1]) for part in _PROMPTS]


def _running(prompt: list[int], token: int) -> RunningSequence:
    request = SamplingRequest(
        prompt=np.asarray(prompt, dtype=np.int32),
        num_samples=1,
        max_tokens=_STEPS + 1,
        seed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        stop=StopRules(frozenset(), ()),
    )
    return RunningSequence(request, 0, None, tokens=[token])


def _step(batch: DecodingBatch | UnbatchedDecoding) -> Tensor:
    """Return the hidden states [S, D] of the sequences' newest tokens, and append other tokens."""
    hidden_SD = batch.hidden()
    for sequence in batch.sequences:
        sequence.tokens.append(sequence.tokens[-1] // 2)
    return hidden_SD


def _expected(base: TorchBaseModel, sequence: RunningSequence) -> Tensor:
    """Return the hidden states [R, D] of a sequence's sampled tokens, computed without a cache."""
    tokens = [*sequence.request.prompt.tolist(), *sequence.tokens[:_STEPS]]
    ids_R = torch.tensor(tokens, device=base.device)
    with torch.no_grad():
        return base.hidden_of(PackedSequences(ids_R, (len(tokens),)), ())[-_STEPS:]
