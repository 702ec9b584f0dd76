"""The inputs of custom losses.

Shape legend: N positions of a datum, K targets per position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkercloud_protocol.requests.tensors import Array, Datum
from tinkercloud_protocol.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class DatumInputs:
    """The inputs of a custom loss for one datum."""

    logprobs_shape: tuple[int, ...]
    """[N] or [N, K], as the client's targets."""
    values: Mapping[str, Array]
    """By name, without `logprobs`: float32 or int64, of the declared rank."""

    @property
    def shape(self) -> "DatumShape":
        """Its shapes, on which alone the cost of a loss depends."""
        values = sorted(self.values.items())
        return DatumShape(
            self.logprobs_shape, tuple((name, v.shape, v.dtype.str) for name, v in values)
        )


@dataclass(frozen=True, slots=True)
class DatumShape:
    """The shapes of the inputs of a custom loss for one datum."""

    logprobs: tuple[int, ...]
    values: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and NumPy's name of the dtype of each input but `logprobs`, by name."""

    @property
    def num_elements(self) -> int:
        """Elements of all inputs."""
        return math.prod(self.logprobs) + sum(math.prod(shape) for _, shape, _ in self.values)


@dataclass(frozen=True, slots=True)
class LossInput:
    """An input of a loss: `logprobs`, or a key of `loss_fn_inputs`."""

    name: str
    rank: int


def inputs_of(inputs: Sequence[LossInput], datum: Datum, where: str) -> DatumInputs:
    """Return the inputs of a loss for a datum, whose targets were checked.

    Raises:
        InvalidRequest: one is missing, or has another rank than the loss has declared.
    """
    logprobs, *others = inputs
    values: dict[str, Array] = {}
    for given in others:
        place = f"{where}.loss_fn_inputs[{given.name!r}]"
        array = datum.inputs.get(given.name)
        if array is None:
            raise InvalidRequest(f"{place}: required by the custom loss")
        if given.rank == 0 and array.size == 1:
            array = array.reshape(())
        if array.ndim != given.rank:
            raise InvalidRequest(
                f"{place}: has rank {array.ndim}, but the custom loss declared {given.rank}"
            )
        values[given.name] = array
    shape = datum.inputs["target_tokens"].shape
    if len(shape) != logprobs.rank:
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['target_tokens']: has rank {len(shape)}, but the custom loss"
            f" declared logprobs with {logprobs.rank}"
        )
    return DatumInputs(shape, values)
