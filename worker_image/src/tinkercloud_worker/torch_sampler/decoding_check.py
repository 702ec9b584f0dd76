"""How a model's sequences may be drawn, asked of each that is loaded.

What slots keep are keys and values, and rows of a step are at different positions. A model that
keeps anything else, or computes from how long its cache is, draws wrongly from them. So sequences
of different lengths are drawn, and compared with what the model computes of them without a cache.
Long ones need not be: masks are the model's own (`masks`), and slots refuse to tell a model their
length, which it would compute something from.

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

from tinkercloud_worker.device.packing import PackedSequences
from tinkercloud_worker.engine.sampler import SamplingRequest, StopRules
from tinkercloud_worker.model.base_model import BaseModel
from tinkercloud_worker.model.self_check import REFUSALS, is_near, scattered_ids
from tinkercloud_worker.torch_sampler.cache import KeyValues, LayerKeyValues
from tinkercloud_worker.torch_sampler.decoding import DecodingBatch, Running, TokenSampler
from tinkercloud_worker.torch_sampler.unbatched import NewCache, UnbatchedDecoding

log = logging.getLogger(__name__)

_PROMPTS = (slice(0, 5), slice(5, 7))
"""Of the tokens that models are checked with."""
_FILLED = 300
"""Positions of another slot, which those of the check read and may not see. Some models keep masks
of their own, with windows of 256."""
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Decoding:
    """How sequences of a model are drawn."""

    slotted: int
    """Positions up to which a sequence may have a slot; longer ones are computed alone."""
    new_cache: NewCache
    """Makes the caches of those."""


def check_decoding(base: BaseModel, token_sampler: TokenSampler) -> Decoding:
    """Return the fastest way of drawing that computes what the model does without a cache."""
    slotted = base.rotary_switch or base.max_context_length
    if not _is_right(base, lambda: _in_slots(base, token_sampler, slotted)):
        slotted = 0
    if slotted == base.max_context_length:
        return Decoding(slotted, _no_cache)
    own_cache = partial(DynamicCache, config=base.config)
    if _is_right(base, lambda: _unbatched(base, token_sampler, own_cache)):
        log.info("sequences of this model are drawn one by one", extra={"longer_than": slotted})
        return Decoding(slotted, own_cache)
    log.warning(
        "each token of this model takes a pass over its whole sequence: it computes something else"
        " with a cache, be it transformers' own. Inference servers may draw faster",
        extra={"model_type": base.config.model_type, "longer_than": slotted},
    )
    return Decoding(slotted, _no_cache)


def _no_cache() -> None:
    return None


def _is_right(base: BaseModel, begin: Callable[[], DecodingBatch | UnbatchedDecoding]) -> bool:
    """Whether the first sequences of a batch come out as without a cache.

    Args:
        base: the model.
        begin: returns the batch, whose sequences have joined.
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
        log.debug("this model is not drawn so", extra={"error": str(error)})
        return False


def _in_slots(base: BaseModel, token_sampler: TokenSampler, longest: int) -> DecodingBatch:
    """Return a batch with slots for the sequences, read in two parts, and for a longer one."""
    batch = DecodingBatch(base, token_sampler)
    key_values: KeyValues = ()
    for sequence in _sequences(base):
        prompt = sequence.request.prompt.tolist()
        cache = batch.new_prefill_cache(len(prompt), ())
        batch.prefill(cache, prompt[:1], 0, None)
        batch.prefill(cache, prompt[1:], 1, None)
        key_values = cache.key_values()
        batch.join(sequence, key_values)
    length = min(_FILLED, longest - _STEPS)
    filled = tuple(
        LayerKeyValues(
            layer.keys.new_zeros(len(layer.keys), length, layer.keys.shape[2]),
            layer.values.new_zeros(len(layer.values), length, layer.values.shape[2]),
        )
        for layer in key_values
    )
    batch.join(_running([0] * length, 0), filled)
    return batch


def _unbatched(
    base: BaseModel, token_sampler: TokenSampler, new_cache: NewCache
) -> UnbatchedDecoding:
    batch = UnbatchedDecoding(base, token_sampler, new_cache)
    for sequence in _sequences(base):
        batch.join(sequence, ())
    return batch


def _sequences(base: BaseModel) -> list[Running]:
    ids = scattered_ids(base).tolist()
    return [_running(ids[part], ids[-1]) for part in _PROMPTS]


def _running(prompt: list[int], token: int) -> Running:
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
    return Running(request, 0, None, tokens=[token])


def _step(batch: DecodingBatch | UnbatchedDecoding) -> Tensor:
    """Return the hidden states [S, D] of the sequences' newest tokens, and let others follow."""
    hidden_SD = batch.hidden()
    for sequence in batch.sequences:
        sequence.tokens.append(sequence.tokens[-1] // 2)
    return hidden_SD


def _expected(base: BaseModel, sequence: Running) -> Tensor:
    """Return the hidden states [R, D] of a sequence's drawn tokens, computed without a cache."""
    tokens = [*sequence.request.prompt.tolist(), *sequence.tokens[:_STEPS]]
    ids_R = torch.tensor(tokens, device=base.device)
    with torch.no_grad():
        return base.hidden_of(PackedSequences(ids_R, (len(tokens),)), ())[-_STEPS:]
