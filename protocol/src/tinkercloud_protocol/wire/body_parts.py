"""Counts the parts of a protobuf body without parsing it.

Each datum, chunk, tensor and setting becomes an object of about fifty bytes, although it may have
only two bytes on the wire; so a body of 64 MiB could become gigabytes before it is checked.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from tinkercloud_protocol.wire.envelope import read_varint
from tinkercloud_protocol.wire.errors import InvalidRequest

_DATA = 3
"""Number of the field of a ForwardBackwardRequest that contains a datum."""


def count_parts(body: bytes, most: int) -> int:
    """Return the number of fields of a ForwardBackwardRequest and its datums, or `most` + 1.

    In an invalid body the fields before the first error are counted; the parser reports the error.
    """
    parts = 0
    pending = [(0, len(body), True)]
    while pending:
        position, end, is_request = pending.pop()
        while position < end:
            parts += 1
            if parts > most:
                return parts
            try:
                field, start, position = _field(body, position)
            except (IndexError, ValueError, InvalidRequest):
                return parts
            if is_request and field == _DATA and start < position:
                pending.append((start, min(position, end), False))
    return parts


def _field(body: bytes, position: int) -> tuple[int, int, int]:
    """Return a field's number, the start of its content and its end.

    Raises:
        IndexError: The body ends within the field.
        ValueError: The field has an unknown wire type.
        InvalidRequest: A number is too long.
    """
    tag, position = read_varint(body, position)
    match tag & 7:
        case 0:
            _, end = read_varint(body, position)
            return tag >> 3, end, end
        case 1:
            return tag >> 3, position + 8, position + 8
        case 2:
            length, start = read_varint(body, position)
            return tag >> 3, start, start + length
        case 5:
            return tag >> 3, position + 4, position + 4
        case kind:
            raise ValueError(kind)
