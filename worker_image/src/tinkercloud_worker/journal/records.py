"""The format of a journal's records, as pure functions on bytes.

A segment is a sequence of records. A record is

    magic  "TJ"     2 bytes
    index           8 bytes   consecutive over all segments of a run
    length          4 bytes   of the payload
    checksum        4 bytes   CRC-32 of the payload
    checksum        4 bytes   CRC-32 of the fields above
    payload         a JSON object, its length first (4 bytes), then the body of the request

Numbers are little-endian. A writer that is killed leaves a record that ends early; after a power
failure the missing rest may read as zeros. Such a tail was never confirmed to anybody and is cut.
Everything else that does not match its checksum is damage, and named as such.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe

_MAGIC = b"TJ"
_FIELDS = struct.Struct("<2sQII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Entry(BaseModel):
    """What a record says about a request, apart from its body."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seq_id: int
    path: str
    role: Literal["gradient", "step", "save", "load", "other"]
    digest: str
    """Hex digest of the content."""
    size: int
    """Bytes that the request takes while it waits."""
    knows_of: str | None = None
    """The failed request whose failure the client had read when it sent this one."""
    key: str | None = None
    """Idempotency key of a request that was sent without a number."""
    read: tuple[str, ...] = ()
    """Ids of results that clients have read since the previous record."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record: its index, what it says, and the request's body."""

    index: int
    entry: Entry
    body: bytes


class DamagedJournal(InvalidRequest):
    """A journal has a part that was written differently."""


def encode(record: Record) -> bytes:
    """Return the bytes of a record."""
    described = record.entry.model_dump_json(exclude_defaults=True).encode()
    payload = b"".join([_CHECKSUM.pack(len(described)), described, record.body])
    fields = _FIELDS.pack(_MAGIC, record.index, len(payload), zlib.crc32(payload))
    return b"".join([fields, _CHECKSUM.pack(zlib.crc32(fields)), payload])


def decode(content: bytes | memoryview, name: str) -> tuple[list[Record], int]:
    """Return the records of a segment, and the number of bytes that they take.

    Bytes after these are the torn tail.

    Args:
        content: the segment.
        name: its name in error messages.

    Raises:
        DamagedJournal: the segment is damaged, other than by a torn tail.
    """
    view, start, records = memoryview(content), 0, list[Record]()
    while start < len(view):
        header = view[start : start + HEADER_BYTES]
        if len(header) < HEADER_BYTES or not any(view[start:]):
            break
        magic, index, length, checksum = _FIELDS.unpack_from(header)
        (header_checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
        if magic != _MAGIC or header_checksum != zlib.crc32(header[: _FIELDS.size]):
            raise _damaged(name, start, "its header differs from its checksum")
        payload = view[start + HEADER_BYTES : start + HEADER_BYTES + length]
        if len(payload) < length:
            break
        end = start + HEADER_BYTES + length
        if zlib.crc32(payload) != checksum:
            if end == len(view) and payload[-1] == 0:
                # The file had its size, and not all of its bytes, when the power failed.
                break
            raise _damaged(name, start, "it differs from its checksum")
        records.append(_record(index, payload, name, start))
        start = end
    return records, start


def _record(index: int, payload: memoryview, name: str, start: int) -> Record:
    (size,) = _CHECKSUM.unpack_from(payload)
    body = _CHECKSUM.size + size
    try:
        entry = Entry.model_validate_json(bytes(payload[_CHECKSUM.size : body]))
    except ValidationError as error:
        raise _damaged(name, start, describe(error)) from None
    return Record(index, entry, bytes(payload[body:]))


def join(segments: Sequence[tuple[str, Sequence[Record]]]) -> list[Record]:
    """Return the records of consecutive segments, each with its name.

    Raises:
        DamagedJournal: records are missing between two of them.
    """
    joined: list[Record] = []
    for name, records in segments:
        for record in records:
            if joined and record.index != joined[-1].index + 1:
                raise DamagedJournal(
                    f"{name}: record {record.index} follows record {joined[-1].index}: the records"
                    " between them are missing"
                )
            joined.append(record)
    return joined


def _damaged(name: str, start: int, how: str) -> DamagedJournal:
    return DamagedJournal(f"{name}: the record at byte {start} is damaged ({how})")
