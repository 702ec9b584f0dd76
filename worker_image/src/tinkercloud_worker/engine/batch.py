"""Validates training requests, and packs examples into micro-batches.

All errors in a request are found here, so trainers only get valid input. Arrays stay NumPy, since
nothing here needs torch.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.tensors import (
    Datum,
    FloatArray,
    ForwardBackwardRequest,
    Int32Array,
    nonfinite_names,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import losses
from tinkercloud_worker.custom_losses.inputs import DatumInputs, inputs_of
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine.prompt_images import TEXT_ONLY, PromptImages
from tinkercloud_worker.vision.prepared import PreparedImage, PreparedPrompt

ScalarT = TypeVar("ScalarT", np.int64, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A validated datum.

    `tokens` is int32 [N]; `targets` int64 [N, K]; each input float32 [N, K], including defaults.
    """

    tokens: Int32Array
    targets: npt.NDArray[np.int64]
    inputs: Mapping[str, FloatArray]
    is_flat: bool
    """Whether the client's targets were [N]: then results are returned as [N], not [N, 1]."""
    custom: DatumInputs | None = None
    """The inputs of an uploaded loss; None for others."""
    images: tuple[PreparedImage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A validated forward or forward_backward request."""

    examples: Sequence[Example]
    loss_fn: str
    forward_only: bool
    unused: Mapping[str, int] = field(default_factory=dict)
    """Inputs without effect, with the number of examples that have them."""
    uploaded: UploadedLoss | None = None
    """The uploaded loss; None for others."""

    @property
    def loss(self) -> losses.Loss:
        """The loss."""
        return losses.find(self.loss_fn) if self.uploaded is None else losses.custom(self.uploaded)

    @property
    def custom_data(self) -> list[DatumInputs]:
        """The inputs of the uploaded loss for each example; none for other losses."""
        return [example.custom for example in self.examples if example.custom is not None]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all examples."""
        return sum(len(example.tokens) for example in self.examples)

    @property
    def loss_weight(self) -> float:
        """What the summed loss is divided by for its mean: weights, data or targets.

        The sum of the weights of cross-entropy, the number of data of an uploaded loss, and the
        number of targets of the others.
        """
        if self.uploaded is not None:
            return float(len(self.examples))
        if self.loss_fn == "cross_entropy":
            weights = (example.inputs["weights"] for example in self.examples)
            return float(sum(each.sum(dtype=np.float64) for each in weights))
        return float(sum(example.targets.size for example in self.examples))

    @property
    def num_targets(self) -> int:
        """The largest number of targets per position."""
        return max(int(example.targets.shape[1]) for example in self.examples)

    def reported_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the response.

        Args:
            sums: the metrics of the trainer, including `loss:sum`.

        Returns:
            The sums; `loss:mean`, the loss per example, which the SDK averages over the chunks of
            a call with weights by their numbers of examples; and for each unused input
            `unused_<name>:sum`, the number of examples that have it.
        """
        unused = {f"unused_{name}:sum": float(count) for name, count in self.unused.items()}
        return {**sums, "loss:mean": sums["loss:sum"] / len(self.examples), **unused}

    def policy_metrics(self, logprobs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the metrics of a loss that compares policies; none for others.

        Args:
            logprobs: for each example, float32 [N], as trainers return them.
        """
        if self.uploaded is not None or not losses.compares_policies(self.loss_fn):
            return {}
        inputs = [example.inputs for example in self.examples]
        return {"ppo_kl:mean": losses.ppo_kl(logprobs, inputs)}

    def custom_metrics(self) -> dict[str, float]:
        """Return the metrics of an uploaded loss, once it was computed; none for others."""
        return {} if self.uploaded is None else self.uploaded.metrics(self.custom_data)

    def elementwise_loss(self, logprobs: Sequence[FloatArray]) -> Sequence[FloatArray]:
        """Return the loss of every target.

        Args:
            logprobs: for each example, float32 [N] or [N, K], as trainers return them.

        Returns:
            For each example, float32 in the shape of its logprobs.
        """
        return losses.per_target(
            self.loss_fn, logprobs, [example.inputs for example in self.examples]
        )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    vocab_size: int
    max_context_length: int


def capped_context_length(configured: int | None, of_model: int) -> int:
    """Return the maximum sequence length, in tokens.

    Args:
        configured: the configured limit; None if there is none.
        of_model: the limit of the model.
    """
    return min(configured or of_model, of_model)


def prepare(
    request: ForwardBackwardRequest, limits: ModelLimits, images: PromptImages = TEXT_ONLY
) -> Batch:
    """Validate a request, fill in the defaults of its loss, and decode its images.

    Args:
        request: the request.
        limits: limits of the model.
        images: how the model reads images.

    Raises:
        InvalidRequest: the loss or one of its settings, inputs, lengths, values or images is
            invalid; the message names the datum and the field.
    """
    config = losses.check_config(request.loss_fn, request.loss_fn_config)
    if not request.data:
        raise InvalidRequest("data: at least one datum is required")
    defaults = losses.defaults(request.loss_fn, config)
    ignored = losses.find(request.loss_fn).ignored
    prompts = _Prompts(request.data, limits, images)
    checked = [
        _example(datum, request.loss_fn, config, defaults, prompts, index)
        for index, datum in enumerate(request.data)
    ]
    return Batch(
        examples=prompts.decoded(checked),
        loss_fn=request.loss_fn,
        forward_only=request.forward_only,
        unused=Counter(name for datum in request.data for name in datum.inputs if name in ignored),
    )


def _example(  # noqa: PLR0917 - one call, just above
    datum: Datum,
    loss_fn: str,
    config: Mapping[str, float],
    defaults: Mapping[str, float],
    prompts: "_Prompts",
    index: int,
) -> Example:
    where = f"data[{index}]"
    many = losses.find(loss_fn).accepts_many_targets
    targets = prompts.targets(index, loss_fn, many=many)
    dropped = {"target_tokens", *losses.find(loss_fn).ignored}
    given = [name for name in datum.inputs if name not in dropped]
    losses.check_inputs(loss_fn, given, config, where)
    for name in nonfinite_names(datum):
        if name in given:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{name!r}]: must be finite, got NaN or Inf"
            )
    inputs: dict[str, FloatArray] = {
        name: np.full(targets.shape, value, dtype=np.float32) for name, value in defaults.items()
    }
    for name in given:
        array = datum.inputs[name]
        if array.shape != targets.shape:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{name!r}]: must have the shape of target_tokens"
                f" {list(targets.shape)}, got {list(array.shape)}"
            )
        inputs[name] = array.astype(np.float32, copy=False)
    losses.check_bounds(inputs, given, where)
    return Example(
        tokens=datum.tokens,
        targets=_as_columns(targets),
        inputs={name: _as_columns(array) for name, array in inputs.items()},
        is_flat=targets.ndim == 1,
    )


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of a request."""

    data: Sequence[Datum]
    limits: ModelLimits
    images: PromptImages

    def __post_init__(self) -> None:
        """Check the images.

        Raises:
            InvalidRequest: one of them is invalid.
        """
        self.images.check(
            (f"data[{index}].model_input", datum.images) for index, datum in enumerate(self.data)
        )

    def targets(self, index: int, loss_fn: str, *, many: bool) -> npt.NDArray[np.int64]:
        """Return the targets of a datum, [N] or [N, K]; the prompt is checked too."""
        datum, where = self.data[index], f"data[{index}].model_input"
        length = self.images.length(len(datum.tokens), datum.images, where)
        check_length(length, self.limits, where)
        if len(datum.tokens):
            _check_range(datum.tokens, self.limits.vocab_size, where)
        return _targets(datum, length, loss_fn, self.limits, f"data[{index}]", many=many)

    def decoded(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples of all data with the tokens of their images."""
        return [
            replace(example, tokens=prompt.tokens, images=prompt.images)
            for index, example in enumerate(examples)
            for prompt in [self._decoded(index)]
        ]

    def _decoded(self, index: int) -> PreparedPrompt:
        datum = self.data[index]
        return self.images.read(datum.tokens, datum.images, f"data[{index}].model_input")


def _targets(
    datum: Datum, length: int, loss_fn: str, limits: ModelLimits, where: str, *, many: bool
) -> npt.NDArray[np.int64]:
    where = f"{where}.loss_fn_inputs['target_tokens']"
    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise InvalidRequest(f"{where} is required")
    if targets.dtype != np.int64:
        raise InvalidRequest(f"{where} must be int64, got {targets.dtype}")
    if targets.ndim not in ((1, 2) if many else (1,)) or targets.size == 0:
        accepted = "[N] or [N, K]" if many else "[N]"
        raise InvalidRequest(
            f"{where}: loss_fn {loss_fn!r} takes a non-empty tensor of shape {accepted}, got"
            f" {list(targets.shape)}"
        )
    if len(targets) != length:
        raise InvalidRequest(
            f"{where} has {len(targets)} positions, but model_input has {length} tokens; both must"
            " have the same length (position i predicts target i)"
        )
    ids = targets.astype(np.int64, copy=False)
    _check_range(ids, limits.vocab_size, where)
    return ids


def prepare_custom(
    request: ForwardBackwardRequest,
    uploaded: UploadedLoss,
    limits: ModelLimits,
    images: PromptImages = TEXT_ONLY,
) -> Batch:
    """Validate a request with an uploaded loss, but not what the loss will cost.

    Args:
        request: the request; inputs that the loss does not read have no effect.
        uploaded: the loss.
        limits: limits of the model.
        images: how the model reads images.

    Raises:
        InvalidRequest: a value is invalid, or the inputs are not those of the loss.
    """
    if not request.data:
        raise InvalidRequest("data: at least one datum is required")
    prompts, examples = _Prompts(request.data, limits, images), []
    for index, datum in enumerate(request.data):
        targets = prompts.targets(index, request.loss_fn, many=True)
        values = inputs_of(uploaded.inputs, datum, f"data[{index}]")
        examples.append(Example(datum.tokens, _as_columns(targets), {}, targets.ndim == 1, values))
    decoded = prompts.decoded(examples)
    return Batch(decoded, request.loss_fn, request.forward_only, uploaded=uploaded)


def check_length(length: int, limits: ModelLimits, where: str) -> None:
    """Check the length of a sequence.

    Raises:
        InvalidRequest: it is empty or too long.
    """
    if not 0 < length <= limits.max_context_length:
        raise InvalidRequest(
            f"{where}: must have 1 to {limits.max_context_length} tokens, got {length}"
        )


def _check_range(ids: npt.NDArray[np.int64] | Int32Array, vocab_size: int, where: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{where}: token ids must be in 0..{vocab_size - 1} (the model's vocabulary), got"
            f" {low if low < 0 else high}"
        )


def _as_columns(array: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
    return array if array.ndim == 2 else array[:, None]


def padded_lengths(lengths: Sequence[int], pad_to_multiple_of: int) -> tuple[int, ...]:
    """Return the lengths, each rounded up to a multiple of a number."""
    return tuple(length + -length % pad_to_multiple_of for length in lengths)


def bin_pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group examples so that each group stays within a token budget (first-fit decreasing).

    The result depends on the lengths alone, so equal requests give bitwise equal results.

    Args:
        lengths: tokens of each example.
        max_tokens: token budget of a group; an example that exceeds it gets its own group.

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
