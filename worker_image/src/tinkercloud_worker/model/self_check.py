"""Checks of each base model that is loaded: that it computes what transformers does.

Shape legend: R positions, D hidden size, V vocabulary, N either of those.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.packing import PackedSequences, watched_windows
from tinkercloud_worker.lora.segments import Route
from tinkercloud_worker.model.architecture import UnsupportedModelError, check_uncapped

log = logging.getLogger(__name__)

_TOKENS = 8
_TOLERANCES = {True: (1e-4, 1e-3), False: (0.03, 0.2)}
"""Of logits, and of hidden states beside others; in float32 and in less.

Logits are taken from the same hidden states, so that only the output layer's rounding is between
them. Another length may take other kernels in every layer, whose rounding a deep model multiplies;
a model that is not causal is as far away as any two.
"""

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What models raise when they are given arguments, or a cache, that they can't compute with."""

_LEAKS = {True: 1e-5, False: 0.02}
"""Of hidden states after one sequence of a pack beside those after another; in float32 and in less.

The same kernels compute both. Only of experts, whose tokens are others, is the rounding another.
"""


class Base(Protocol):
    """What is checked of a `BaseModel`."""

    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def vocab_size(self) -> int:
        """Tokens of its vocabulary."""

    def hidden_of(self, sequences: PackedSequences, routes: Sequence[Route]) -> Tensor:
        """Return the final hidden states [R, D]."""

    def logits(self, hidden_RD: Tensor, routes: Sequence[Route]) -> Tensor:
        """Return the logits [R, V] of hidden states."""


def check_logits(base: Base, model: PreTrainedModel) -> None:
    """Compare logits with the model's own, and the first of many positions with them alone.

    Raises:
        UnsupportedModelError: they differ: the model scales or caps its logits, or is not causal,
            in a way that `BaseModel` does not know.
    """
    check_uncapped(model.config.get_text_config())
    ids_R = scattered_ids(base)
    with torch.no_grad():
        try:
            theirs_RV = model(input_ids=ids_R[None]).logits[0]
            alone_RD = _hidden(base, ids_R)
            begun_RD = _hidden(base, torch.cat([ids_R, ids_R]))[: len(ids_R)]
            logits_error = _distance(base.logits(alone_RD, ()), theirs_RV)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers, or an output embedding, of a form that this"
                f" engine does not compute ({type(error).__name__}: {error}); it can't be served"
            ) from error
    causal_error = _distance(begun_RD, alone_RD)
    tolerances = _TOLERANCES[base.dtype == torch.float32]
    if not (logits_error <= tolerances[0] and causal_error <= tolerances[1]):
        raise UnsupportedModelError(
            f"{type(model).__name__} is computed in a way this engine does not reproduce (relative"
            f" difference of logits {logits_error:.1e}, of positions that others follow"
            f" {causal_error:.1e}); it can't be served"
        )
    errors = {"logits_error": logits_error, "causal_error": causal_error}
    log.debug("base model checked", extra=errors)


def keeps_sequences_apart(base: Base) -> bool:
    """Compare a sequence of a pack with the same alone, and with the same after another.

    A window is longer than the sequences: that it is kept in packs is not seen of hidden states,
    but of what attention is told.
    """
    ids_R = scattered_ids(base)
    with torch.no_grad():
        try:
            packed_RD = _hidden_after(base, ids_R, ids_R)
            other_RD = _hidden_after(base, ids_R.flip(0), ids_R)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as refusal:
            # Of recurrent layers, mostly, which look for padding in the mask.
            log.debug("this model takes no packs", extra={"error": str(refusal)})
            return False
        with watched_windows() as windows:
            alone_RD = _hidden(base, ids_R)
    error, leak = _distance(packed_RD, alone_RD), _distance(packed_RD, other_RD)
    is_float32 = base.dtype == torch.float32
    return windows.are_told and error <= _TOLERANCES[is_float32][1] and leak <= _LEAKS[is_float32]


def is_near(base: Base, ours_RN: Tensor, theirs_RN: Tensor) -> bool:
    """Whether hidden states differ by no more than the rounding of other kernels."""
    return _distance(ours_RN, theirs_RN) <= _TOLERANCES[base.dtype == torch.float32][1]


def scattered_ids(base: Base) -> Tensor:
    """Return the ids [R] of a few tokens that models are checked with."""
    # From all over the vocabulary: the first ones are often never trained, and what a model makes
    # of those in bfloat16 is noise.
    stride = base.vocab_size // (_TOKENS + 1)
    return torch.arange(1, _TOKENS + 1, device=base.device) * stride


def _hidden(base: Base, ids_R: Tensor) -> Tensor:
    return base.hidden_of(PackedSequences(ids_R, (len(ids_R),)), ())


def _hidden_after(base: Base, first_R: Tensor, second_R: Tensor) -> Tensor:
    """Return the hidden states [R, D] of the second sequence of a pack."""
    sequences = PackedSequences(torch.cat([first_R, second_R]), (len(first_R), len(second_R)))
    return base.hidden_of(sequences, ())[len(first_R) :]


def _distance(ours_RN: Tensor, theirs_RN: Tensor) -> float:
    """Return by how much of its length the vector of a token differs, in the median."""
    difference_R = (ours_RN.float() - theirs_RN.float()).norm(dim=1)
    return float((difference_R / theirs_RN.float().norm(dim=1).clamp(min=1e-6)).median())
