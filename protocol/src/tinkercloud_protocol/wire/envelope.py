"""The parts of a payload that a proxy reads to route it, and nothing more.

The API server forwards training bodies as bytes. It reads the first two fields of a protobuf body
(`model_id` = 1, `seq_id` = 2), which every serializer writes first, and the value of one key of a
JSON body. Both formats allow a field to occur twice, and a full parser uses the last one. The head
parses the whole body and compares it with the fields that the proxy routed by
(`routes.TARGET_HEADER`) and with those that it read itself (`TrainingEnvelope.check`). A body that
two readers would interpret differently is rejected.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

import re
from dataclasses import dataclass

from tinkercloud_protocol.wire.errors import InvalidRequest

PREFIX_BYTES = 4096
"""A prefix of this length holds both fields: ids are at most 200 bytes long."""

_MODEL_ID_TAG = 0x0A  # field 1, length-delimited
_SEQ_ID_TAG = 0x10  # field 2, varint


@dataclass(frozen=True, slots=True)
class TrainingEnvelope:
    """The destination of a training request, and its position in that model's order."""

    model_id: str
    seq_id: int

    def check(self, model_id: str, seq_id: int) -> None:
        """Check that a whole body agrees with its beginning.

        Raises:
            InvalidRequest: The body names another model or number further on.
        """
        if (model_id, seq_id) != (self.model_id, self.seq_id):
            raise InvalidRequest(
                "model_id, seq_id: the body contains different values, first"
                f" {self.model_id!r} and {self.seq_id}, then {model_id!r} and {seq_id}; send"
                " each field once"
            )


def peek_training(prefix: bytes) -> TrainingEnvelope:
    """Read model_id and seq_id from the first bytes of a protobuf ForwardBackwardRequest.

    Raises:
        InvalidRequest: the prefix does not begin with these two fields.
    """
    try:
        if prefix[0] != _MODEL_ID_TAG:
            raise InvalidRequest(_NOT_PROTO)
        length, start = read_varint(prefix, 1)
        end = start + length
        if length > PREFIX_BYTES or end > len(prefix):
            raise InvalidRequest(_NOT_PROTO)
        model_id = prefix[start:end].decode()
        seq_id = 0
        if end < len(prefix) and prefix[end] == _SEQ_ID_TAG:
            seq_id, _ = read_varint(prefix, end + 1)
            # A negative number is encoded as its 64-bit two's complement.
            seq_id -= (seq_id >> 63) << 64
    except (IndexError, UnicodeDecodeError):
        raise InvalidRequest(_NOT_PROTO) from None
    return TrainingEnvelope(model_id, seq_id)


_NOT_PROTO = (
    "request body: not a protobuf ForwardBackwardRequest that starts with model_id; send"
    " application/x-protobuf, as tinker 0.25 and later do, or JSON with Content-Type:"
    " application/json"
)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of a protobuf body, and the position after it.

    Raises:
        IndexError: The body ends within the number.
        InvalidRequest: It has more than 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise InvalidRequest(_NOT_PROTO)


def peek_json(body: bytes, key: str) -> str:
    """Return the string value of `key` in a JSON body without parsing the rest.

    Quotes inside a JSON string are escaped, so the pattern only matches keys. If the key occurs in
    a nested object first, the head's comparison rejects the request.

    Raises:
        InvalidRequest: The key is absent or its value is not a plain string.
    """
    name = b'"' + key.encode() + b'"'
    pattern = re.compile(name + rb'\s*:\s*"([^"\\]{1,256})"')
    # A search for the bare name is much faster: a batch has megabytes before its last field.
    start = body.find(name)
    while start >= 0:
        if (match := pattern.match(body, start)) is not None:
            return match[1].decode(errors="replace")
        start = body.find(name, start + 1)
    raise InvalidRequest(f"{key}: required, and must be a string")


def peek_number(body: bytes, key: str) -> int | None:
    """Return the first value of `key` in a JSON body that is a whole number of up to ten digits."""
    found = re.search(b'"' + key.encode() + rb'"\s*:\s*(\d{1,10})(?=\s*[,}])', body)
    return int(found[1]) if found else None


def peek_json_place(beginning: bytes) -> bytes:
    """Return a JSON body with the model_id and the seq_id at the beginning of another one.

    Fields that are missing there are left out.
    """
    names = [rb'"model_id"\s*:\s*"[^"\\]{1,256}"', rb'"seq_id"\s*:\s*\d{1,10}(?=\s*[,}])']
    found = [match[0] for name in names if (match := re.search(name, beginning))]
    return b"{" + b",".join(found) + b"}"


def names_place(place: bytes) -> bool:
    """Return whether the result of `peek_json_place` has both a model_id and a seq_id."""
    return b'"model_id"' in place and b'"seq_id"' in place
