"""From a decoded request to something a trainer can run: checks, then micro-batches.

Everything about a request that can be wrong is found here, before it is queued, so that a trainer
only ever sees sound input. Arrays stay NumPy: nothing here needs torch's tensors.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import (
    Datum,
    FloatArray,
    ForwardBackwardRequest,
    Int32Array,
    nonfinite_names,
)
from tinkercloud_worker import losses

ScalarT = TypeVar("ScalarT", np.int64, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sound datum.

    `tokens` is int32 [N]; `targets` int64 [N, K]; each input float32 [N, K], defaults filled in.
    """

    tokens: Int32Array
    targets: npt.NDArray[np.int64]
    inputs: Mapping[str, FloatArray]
    is_flat: bool
    """Whether the client's targets were [N]: then results go back as [N], not [N, 1]."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A sound forward or forward_backward request."""

    examples: Sequence[Example]
    loss_fn: str
    forward_only: bool
    unused: Mapping[str, int] = field(default_factory=dict)
    """Inputs that were sent and have no effect, each with the number of examples that have it."""

    @property
    def num_tokens(self) -> int:
        """Positions of all examples."""
        return sum(len(example.tokens) for example in self.examples)

    @property
    def num_targets(self) -> int:
        """The most targets that a position has."""
        return max(int(example.targets.shape[1]) for example in self.examples)

    def reported_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an answer.

        Args:
            sums: `loss:sum` and what else a trainer returns.

        Returns:
            Besides these `loss:mean`, the loss per example: what the SDK makes of the means of a
            call's parts, which it weighs by their numbers of examples, is that of the call. And of
            each unused input, as `unused_<name>:sum`, the number of examples that have it.
        """
        unused = {f"unused_{name}:sum": float(count) for name, count in self.unused.items()}
        return {**sums, "loss:mean": sums["loss:sum"] / len(self.examples), **unused}

    def elementwise_loss(self, logprobs: Sequence[FloatArray]) -> Sequence[FloatArray] | None:
        """Return the loss of every target, if the hosted service reports it for this loss.

        Args:
            logprobs: per example, float32 [N] or [N, K], as trainers return them.

        Returns:
            For cross_entropy -weight * logprob, per example float32 of the shape of its logprobs;
            for other losses None.
        """
        if self.loss_fn != "cross_entropy":
            return None
        return [
            -lp * example.inputs["weights"].reshape(lp.shape)
            for lp, example in zip(logprobs, self.examples, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What the served model accepts."""

    vocab_size: int
    max_context_length: int


def capped_context_length(configured: int | None, of_model: int) -> int:
    """Return the longest sequence that is accepted, in tokens.

    Args:
        configured: the limit that was set; None if none was.
        of_model: the longest sequence the model takes.
    """
    return min(configured or of_model, of_model)


def prepare(request: ForwardBackwardRequest, limits: TokenLimits) -> Batch:
    """Check a request and fill in its loss's defaults.

    Raises:
        InvalidRequest: the loss or one of its settings, inputs, lengths or values is not
            acceptable; the message names the datum and the field.
    """
    config = losses.check_config(request.loss_fn, request.loss_fn_config)
    if not request.data:
        raise InvalidRequest("data: at least one datum is required")
    defaults = losses.defaults(request.loss_fn, config)
    ignored = losses.find(request.loss_fn).ignored
    return Batch(
        examples=[
            _example(datum, request.loss_fn, config, defaults, limits, f"data[{index}]")
            for index, datum in enumerate(request.data)
        ],
        loss_fn=request.loss_fn,
        forward_only=request.forward_only,
        unused=Counter(name for datum in request.data for name in datum.inputs if name in ignored),
    )


def _example(  # noqa: PLR0917 - one call, just above
    datum: Datum,
    loss_fn: str,
    config: Mapping[str, float],
    defaults: Mapping[str, float],
    limits: TokenLimits,
    where: str,
) -> Example:
    _check_tokens(datum.tokens, limits, f"{where}.model_input")
    targets = _targets(datum, loss_fn, limits, where)
    dropped = {"target_tokens", *losses.find(loss_fn).ignored}
    given = [name for name in datum.inputs if name not in dropped]
    losses.check_inputs(loss_fn, given, config, where)
    for name in nonfinite_names(datum):
        if name in given:
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}] holds a NaN or an infinity")
    inputs: dict[str, FloatArray] = {
        name: np.full(targets.shape, value, dtype=np.float32) for name, value in defaults.items()
    }
    for name in given:
        array = datum.inputs[name]
        if array.shape != targets.shape:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{name!r}] has shape {list(array.shape)}, but"
                f" target_tokens has {list(targets.shape)}; they must be equal"
            )
        inputs[name] = array.astype(np.float32, copy=False)
    losses.check_bounds(inputs, given, where)
    return Example(
        tokens=datum.tokens,
        targets=_as_columns(targets),
        inputs={name: _as_columns(array) for name, array in inputs.items()},
        is_flat=targets.ndim == 1,
    )


def _targets(datum: Datum, loss_fn: str, limits: TokenLimits, where: str) -> npt.NDArray[np.int64]:
    where = f"{where}.loss_fn_inputs['target_tokens']"
    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise InvalidRequest(f"{where} is required")
    if targets.dtype != np.int64:
        raise InvalidRequest(f"{where} must be int64, got {targets.dtype}")
    many = losses.find(loss_fn).accepts_many_targets
    if targets.ndim not in ((1, 2) if many else (1,)) or targets.size == 0:
        accepted = "[N] or [N, K]" if many else "[N]"
        raise InvalidRequest(
            f"{where} has shape {list(targets.shape)}: loss_fn {loss_fn!r} takes {accepted},"
            " not empty"
        )
    if len(targets) != len(datum.tokens):
        raise InvalidRequest(
            f"{where} has {len(targets)} positions, but model_input has {len(datum.tokens)} tokens;"
            " they must be equal (position i predicts target i)"
        )
    ids = targets.astype(np.int64, copy=False)
    _check_range(ids, limits.vocab_size, where)
    return ids


def check_length(length: int, limits: TokenLimits, where: str) -> None:
    """Check that a sequence is one that the model can read.

    Raises:
        InvalidRequest: it has no tokens, or too many.
    """
    if not 0 < length <= limits.max_context_length:
        raise InvalidRequest(
            f"{where} has {length} tokens: the model takes 1 to {limits.max_context_length}"
        )


def _check_tokens(tokens: Int32Array, limits: TokenLimits, where: str) -> None:
    check_length(len(tokens), limits, where)
    _check_range(tokens, limits.vocab_size, where)


def _check_range(ids: npt.NDArray[np.int64] | Int32Array, vocab_size: int, where: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{where} holds token id {low if low < 0 else high}: the model's vocabulary is"
            f" 0..{vocab_size - 1}"
        )


def _as_columns(array: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
    return array if array.ndim == 2 else array[:, None]


def padded_lengths(lengths: Sequence[int], pad_to_multiple_of: int) -> tuple[int, ...]:
    """Return lengths, each rounded up to a multiple of a number."""
    return tuple(length + -length % pad_to_multiple_of for length in lengths)


def bin_pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split examples into few groups whose tokens stay within a budget (first-fit decreasing).

    It depends on the lengths alone, so equal requests give equal bits.

    Args:
        lengths: tokens of each example.
        max_tokens: budget for the tokens of a group; an example that exceeds it alone is a group
            of its own.

    Returns:
        Indices of each group's examples, longest first.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = (g for g, tokens in enumerate(room) if lengths[index] <= tokens)
        if (group := next(fitting, None)) is None:
            group = len(groups)
            groups.append([])
            room.append(max_tokens)
        groups[group].append(index)
        room[group] -= lengths[index]
    return groups
