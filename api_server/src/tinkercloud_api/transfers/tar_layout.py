"""The layout of a file that is streamed from objects, such as a tar file that is never stored.

A layout is a sequence of segments: bytes, or objects of known size. So its size is known before
anything is read, and any part of it can be read alone.
"""

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the store."""

    key: str
    size: int


Segment = bytes | StoredObject


def size_of(segment: Segment) -> int:
    """Return the size of a segment in bytes."""
    return len(segment) if isinstance(segment, bytes) else segment.size


def total_size(layout: Sequence[Segment]) -> int:
    """Return the size of a whole layout in bytes."""
    return sum(size_of(segment) for segment in layout)


def tar(files: Mapping[str, Segment], modified: datetime) -> list[Segment]:
    """Return the layout of an uncompressed tar file.

    Args:
        files: contents by name.
        modified: time of modification of all files.
    """
    layout: list[Segment] = []
    for name, content in files.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = size_of(content), int(modified.timestamp())
        padding = bytes(-entry.size % tarfile.BLOCKSIZE)
        layout += [entry.tobuf(tarfile.GNU_FORMAT), content, padding]
    return [*layout, bytes(2 * tarfile.BLOCKSIZE)]


def cut(layout: Sequence[Segment], part: range) -> Iterator[tuple[Segment, range]]:
    """Yield the segments of which a part of a layout consists, each with the bytes in the part."""
    start = 0
    for segment in layout:
        stop = start + size_of(segment)
        within = range(max(part.start, start) - start, min(part.stop, stop) - start)
        if within:
            yield segment, within
        start = stop
