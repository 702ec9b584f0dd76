"""The parts in which large files are uploaded to and downloaded from an object store.

S3 and Google Cloud Storage accept 10 000 parts per object, of 5 MiB to 5 GiB each; a file of
AdamW's moments has 8 bytes per parameter of the model. A request has to finish within half a
minute, and its rest can be requested ten times after interruptions: a file in one response would
have five minutes, however large it is.
"""

from collections.abc import Generator

SMALLEST_PART = 5 << 20
"""Minimum size that S3 accepts for all parts except the last, in bytes."""
MOST_PARTS = 9000
"""Maximum number of parts per object, with a margin."""
IN_FLIGHT = 12
"""Parts of a file in transfer at the same time: 60 MiB, or 0.14 % of a file whose parts are larger
than the minimum."""


def part_size(size: int) -> int:
    """Return the part size for a file of this size, in bytes."""
    return max(SMALLEST_PART, -(-size // MOST_PARTS))


def parts(size: int) -> Generator[slice]:
    """Yield the byte range of each part of a file of this size."""
    step = part_size(size)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
