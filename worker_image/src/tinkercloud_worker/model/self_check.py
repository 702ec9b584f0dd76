"""Checks after loading that a base model computes the same results as transformers.

Shape legend: R positions, D hidden size, V vocabulary, N either of those.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.packed_attention import PackedSequences, watched_windows
from tinkercloud_worker.lora.segments import WeightSegment
from tinkercloud_worker.model.architecture import UnsupportedModelError

log = logging.getLogger(__name__)

_TOKENS = 8
_TOLERANCES = {True: (1e-4, 1e-3), False: (0.03, 0.2)}
"""Tolerances of logits and of hidden states in packs, for float32 (True) and half precision
(False).

Logits are compared from the same hidden states, so they differ only by the rounding of the LM head.
A different length may select different kernels in every layer, and a deep model amplifies their
rounding; for a model that is not causal, the difference is as large as between unrelated tokens.
"""

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that models raise for unsupported arguments or caches."""

_LEAKS = {True: 1e-5, False: 0.02}
"""Tolerances of hidden states when the preceding sequence of a pack changes, as above.

The same kernels compute both; only experts, which receive different tokens, round differently.
"""


class Base(Protocol):
    """The part of a `BaseModel` that is checked."""

    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device it computes on."""

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""

    def hidden_of(self, sequences: PackedSequences, segments: Sequence[WeightSegment]) -> Tensor:
        """Return the final hidden states [R, D]."""

    def logits(self, hidden_RD: Tensor, segments: Sequence[WeightSegment]) -> Tensor:
        """Return the logits [R, V] of hidden states."""


def check_logits(base: Base, model: PreTrainedModel) -> None:
    """Compare logits with the model's own, and check that earlier positions ignore later ones.

    Raises:
        UnsupportedModelError: they differ, because the model changes its logits, or is not causal,
            in a way that `BaseModel` does not support.
    """
    ids_R = scattered_ids(base)
    with torch.no_grad():
        try:
            theirs_RV = model(input_ids=ids_R[None]).logits[0]
            alone_RD = _hidden(base, ids_R)
            prefix_RD = _hidden(base, torch.cat([ids_R, ids_R]))[: len(ids_R)]
            logits_error = _distance(base.logits(alone_RD, ()), theirs_RV)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: this engine can't compute its layers or"
                f" its LM head ({type(error).__name__}: {error})"
            ) from error
    causal_error = _distance(prefix_RD, alone_RD)
    tolerances = _TOLERANCES[base.dtype == torch.float32]
    if not (logits_error <= tolerances[0] and causal_error <= tolerances[1]):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported: this engine does not reproduce its results"
            f" (relative difference {logits_error:.1e} in logits,"
            f" {causal_error:.1e} in hidden states when more positions follow)"
        )
    errors = {"logits_error": logits_error, "causal_error": causal_error}
    log.debug("base model checked", extra=errors)


def keeps_sequences_apart(base: Base) -> bool:
    """Check that a sequence in a pack gives the same result alone and after another sequence.

    Attention windows are longer than these sequences: whether packs respect them can't be seen in
    hidden states, but in the arguments of attention.
    """
    ids_R = scattered_ids(base)
    with torch.no_grad():
        try:
            packed_RD = _hidden_after(base, ids_R, ids_R)
            other_RD = _hidden_after(base, ids_R.flip(0), ids_R)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as refusal:
            # Raised mostly by recurrent layers, which look for padding in the mask.
            log.debug("this model does not support packs", extra={"error": str(refusal)})
            return False
        with watched_windows() as windows:
            alone_RD = _hidden(base, ids_R)
    error, leak = _distance(packed_RD, alone_RD), _distance(packed_RD, other_RD)
    is_float32 = base.dtype == torch.float32
    return windows.are_passed and error <= _TOLERANCES[is_float32][1] and leak <= _LEAKS[is_float32]


def is_near(base: Base, ours_RN: Tensor, theirs_RN: Tensor) -> bool:
    """Whether hidden states differ by no more than the rounding of different kernels."""
    return _distance(ours_RN, theirs_RN) <= _TOLERANCES[base.dtype == torch.float32][1]


def scattered_ids(base: Base) -> Tensor:
    """Return the ids [R] of a few tokens for checking models."""
    # Spread over the vocabulary: the first tokens are often untrained, and their results in
    # bfloat16 are noise.
    stride = base.vocab_size // (_TOKENS + 1)
    return torch.arange(1, _TOKENS + 1, device=base.device) * stride


def _hidden(base: Base, ids_R: Tensor) -> Tensor:
    return base.hidden_of(PackedSequences(ids_R, (len(ids_R),)), ())


def _hidden_after(base: Base, first_R: Tensor, second_R: Tensor) -> Tensor:
    """Return the hidden states [R, D] of the second sequence of a pack."""
    sequences = PackedSequences(torch.cat([first_R, second_R]), (len(first_R), len(second_R)))
    return base.hidden_of(sequences, ())[len(first_R) :]


def _distance(ours_RN: Tensor, theirs_RN: Tensor) -> float:
    """Return the median relative difference of the vectors of tokens."""
    difference_R = (ours_RN.float() - theirs_RN.float()).norm(dim=1)
    return float((difference_R / theirs_RN.float().norm(dim=1).clamp(min=1e-6)).median())
