"""Counts the parts of a protobuf body without parsing it.

Each datum, chunk, tensor and setting becomes an object of some fifty bytes however few it has on
the wire, two at least; so a body of 64 MiB could become gigabytes before anything of it is seen.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

_DATA = 3
"""Field of a ForwardBackwardRequest that holds a datum."""


def count_parts(body: bytes, most: int) -> int:
    """Return how many fields a ForwardBackwardRequest and its datums have, or `most` + 1.

    Of what is not protobuf, those before the first fault are counted: the parser tells the fault.
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
            except (IndexError, ValueError):
                return parts
            if is_request and field == _DATA and start < position:
                pending.append((start, min(position, end), False))
    return parts


def _field(body: bytes, position: int) -> tuple[int, int, int]:
    """Return a field's number, where its content starts and where it ends.

    Raises:
        IndexError: the body ends within it.
        ValueError: it is of no kind that has content to skip.
    """
    tag, position = _varint(body, position)
    match tag & 7:
        case 0:
            _, end = _varint(body, position)
            return tag >> 3, end, end
        case 1:
            return tag >> 3, position + 8, position + 8
        case 2:
            length, start = _varint(body, position)
            return tag >> 3, start, start + length
        case 5:
            return tag >> 3, position + 4, position + 4
        case kind:
            raise ValueError(kind)


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(shift)
