"""Checks of training batches that do not depend on their encoding, protobuf or JSON.

Shape legend: N tokens of a datum, K targets per position.
"""

import math
from collections.abc import Iterable, Sequence

from tinkercloud_protocol.requests.tensors import Array, densify
from tinkercloud_protocol.wire.bounds import MAX_TOKENS_AT_A_POSITION
from tinkercloud_protocol.wire.errors import InvalidRequest

MAX_SPREAD_BYTES = 256 << 20
"""Maximum size of all sparse tensors of a request when dense: a few bytes can declare any shape.
The largest request of the SDK, 5 MB with 20 bytes per position, stays below it with up to 80
targets per position."""

MAX_PARTS = 1 << 18
"""Maximum number of datums, chunks, tensors and loss settings of a request together: each becomes
an object that is larger than its bytes on the wire. The SDK sends at most 1024 datums."""


def check_parts(parts: int) -> None:
    """Check the number of datums, chunks, tensors and loss settings of a request together.

    Raises:
        InvalidRequest: there are more than `MAX_PARTS`.
    """
    if parts > MAX_PARTS:
        raise InvalidRequest(
            f"data, loss_fn_config: the request has at least {parts} datums, chunks, tensors"
            f" and settings in total; at most {MAX_PARTS} are accepted. Send less data per"
            " request (the SDK sends at most 1024 datums per chunk)"
        )


def check_spread(shapes: Iterable[Sequence[int]]) -> None:
    """Check the size that sparse tensors of these shapes have when dense.

    Raises:
        InvalidRequest: they would have more than `MAX_SPREAD_BYTES`.
    """
    # Only the first two sizes: `check_shape` rejects more, and their product could be huge.
    spread = sum(8 * math.prod(max(size, 1) for size in shape[:2]) for shape in shapes)
    if spread > MAX_SPREAD_BYTES:
        raise InvalidRequest(
            f"data: sparse tensors expand to {spread} bytes (8 per element); at most"
            f" {MAX_SPREAD_BYTES} are accepted. Send less data per request, or fewer targets"
            " per position"
        )


def check_shape(shape: Sequence[int], where: str) -> None:
    """Check the shape of a tensor, which is empty if it was not sent.

    Raises:
        InvalidRequest: it has more than two dimensions, a negative one, or a K above the limit.
    """
    if len(shape) > 2:
        raise InvalidRequest(f"{where}: shape has {len(shape)} dimensions; one or two are accepted")
    if min(shape, default=0) < 0:
        raise InvalidRequest(
            f"{where}: shape {list(shape)} has a negative dimension; use 0 or more"
        )
    if len(shape) == 2 and shape[1] > MAX_TOKENS_AT_A_POSITION:
        raise InvalidRequest(
            f"{where}: shape {list(shape)} has {shape[1]} values per position; at most"
            f" {MAX_TOKENS_AT_A_POSITION} are accepted"
        )


def shaped(values: Array, shape: Sequence[int], where: str) -> Array:
    """Return flat values as [N] or [N, K]; an empty shape means [N].

    Raises:
        InvalidRequest: the shape needs another number of values.
    """
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise InvalidRequest(
            f"{where}: shape {list(shape)} needs {math.prod(shape)} values, got {values.size}"
        )
    return values.reshape(shape) if len(shape) == 2 else values


def dense_of_csr(  # noqa: PLR0917 - the three arrays of a CSR tensor, and what it must fit
    values: Array, crow: Array, col: Array, shape: Sequence[int], num_tokens: int | None, where: str
) -> Array:
    """Return the dense [N, K] array of a CSR tensor of a datum.

    Args:
        values: the values that are not zero.
        crow: int64 [N + 1], where each row starts in `values`.
        col: int64, the column of each value.
        shape: [N, K], checked.
        num_tokens: N of the datum; None if it is not known yet.
        where: name of the tensor, for messages.

    Raises:
        InvalidRequest: it has another number of rows than the datum has tokens, or its indices do
            not describe a tensor of this shape.
    """
    if shape and num_tokens is not None and shape[0] != num_tokens:
        raise InvalidRequest(
            f"{where} has {shape[0]} rows, but model_input has {num_tokens} tokens; they must"
            " be equal"
        )
    return densify(values, crow, col, shape=shape, where=where)
