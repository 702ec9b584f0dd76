"""Examples and results of requests as NumPy arrays, which `payloads` decodes and encodes.

Engines compute with these, and do not depend on protobuf.

Shape legend: N tokens of a datum, K targets per position.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.wire.errors import InvalidRequest

Array = npt.NDArray[np.float32 | np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

EMPTY_TOP_TOKEN = 0
EMPTY_TOP_LOGPROB = -99999.0
"""Value of an empty cell of a top-k table on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One training example.

    `tokens` is int32, the text only; inputs are float32 or int64, [N] or [N, K], where N counts the
    tokens of images too.
    """

    tokens: Int32Array
    inputs: Mapping[str, Array]
    images: tuple[ImagePart, ...] = ()


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is assembled from its chunks."""

    num_tokens: int = 0
    """Number of text tokens so far."""
    _parts: list[Int32Array] = field(default_factory=list)
    _images: list[ImagePart] = field(default_factory=list)

    def add_tokens(self, tokens: Int32Array) -> None:
        """Append text, int32 [any]."""
        self._parts.append(tokens)
        self.num_tokens += len(tokens)

    def add_image(self, image: ImagePart) -> None:
        """Append an image, whose offset is `num_tokens`."""
        self._images.append(image)

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """All images, in order."""
        return tuple(self._images)

    @property
    def tokens(self) -> Int32Array:
        """All text tokens; a view if there is one chunk."""
        if len(self._parts) == 1:
            return self._parts[0]
        return np.concatenate([np.empty(0, np.int32), *self._parts])

    @property
    def length(self) -> int | None:
        """Length in tokens as the client counts it; None if the client has not counted an image."""
        if not self._images:
            return self.num_tokens
        counts = [image.expected_tokens for image in self._images]
        known = [count for count in counts if count is not None]
        return self.num_tokens + sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardRequest:
    """A decoded forward_backward request."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool
    wants_losses: bool = False
    """Whether the result has the loss of every target for all losses, as plain HTTP clients expect;
    to the SDK only that of cross_entropy is returned, as by the hosted service."""
    images: tuple[ImagePart, ...] = field(init=False, repr=False)
    """The images of all data."""

    def __post_init__(self) -> None:
        """Collect the images once: there may be thousands of data."""
        images = tuple(image for datum in self.data for image in datum.images)
        object.__setattr__(self, "images", images)

    @property
    def num_bytes(self) -> int:
        """Size of its decoded tokens and tensors and of its image files in bytes."""
        return sum(
            datum.tokens.nbytes
            + sum(array.nbytes for array in datum.inputs.values())
            + sum(len(image.data) for image in datum.images)
            for datum in self.data
        )

    def digest(self) -> bytes:
        """Return a digest of the content, which does not depend on the encoding."""
        hasher = hashlib.blake2b(digest_size=16)
        config = sorted(self.loss_fn_config.items())
        hasher.update(repr((self.loss_fn, config, self.forward_only)).encode())
        for datum in self.data:
            hasher.update(b"\x00" + datum.tokens.tobytes())
            for name in sorted(datum.inputs):
                array = datum.inputs[name]
                hasher.update(repr((name, array.shape, array.dtype.str)).encode())
                hasher.update(np.ascontiguousarray(array).data)
            for image in datum.images:
                known = (image.offset, image.format, image.expected_tokens, len(image.data))
                hasher.update(repr(known).encode() + image.data)
        return hasher.digest()


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The k most likely tokens at L positions: ids int32 [L, k], logprobs float32 [L, k]."""

    token_ids: Int32Array
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence: token ids and their logprobs at temperature 1, both [L]."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """True if a stop rule ended the sequence, False if it reached its maximum length."""
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Scores of a prompt of P tokens; scores that were not requested are None."""

    logprobs: FloatArray | None = None
    """float32 [P]; NaN where not scored (always at position 0)."""
    top: TopLogprobs | None = None
    """[P, k]; empty cells where not scored."""
    targets: FloatArray | None = None
    """float32 [P - 1, K]; 0.0 in cells without a token."""
    alternatives: tuple[npt.NDArray[np.int64], FloatArray] | None = None
    """Tokens sampled at each position after the first, and their logprobs: both [P - 1, k]."""
    cached_tokens: int = 0


def densify(
    values: Array, crow: Array, col: Array, *, shape: Sequence[int], where: str, fill: int = 0
) -> Array:
    """Return the dense [N, K] array of a CSR array; other cells are set to `fill`.

    Raises:
        InvalidRequest: The indices are not those of a CSR array of this shape.
    """
    if len(shape) != 2:
        raise InvalidRequest(f"{where}: a sparse tensor requires a shape with two dimensions")
    rows, columns = int(shape[0]), int(shape[1])
    # Compared, not subtracted: differences of client values may overflow.
    sound = (
        crow.size == rows + 1
        and values.size == col.size
        and crow[0] == 0
        and crow[-1] == col.size
        and bool(np.all(crow[1:] >= crow[:-1]))
        and bool(np.all((col >= 0) & (col < columns)))
    )
    if not sound:
        raise InvalidRequest(
            f"{where}: the CSR indices do not describe a [{rows}, {columns}] tensor: crow_indices"
            " must increase from 0 to the number of values, and col_indices must be valid columns"
        )
    dense = np.full((rows, columns), fill, dtype=values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return dense


def nonfinite_names(datum: Datum) -> Iterator[str]:
    """Yield the names of a datum's float inputs that contain a NaN or an infinity."""
    for name, array in datum.inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            yield name
