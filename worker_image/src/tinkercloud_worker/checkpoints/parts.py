"""The parts that large files go to an object store in, and come back in.

S3 takes 10 000 parts of an object, of 5 MiB to 5 GiB each, and Google Cloud Storage does too; a
file of AdamW's moments has 8 bytes for each parameter of a model. A request has half a minute, and
what is left of one that was cut off may be asked for ten times: a file that comes as one answer
would have five minutes, however large it is.
"""

from collections.abc import Generator

SMALLEST_PART = 5 << 20
"""Bytes; the least that S3 takes, but for the last part of an object."""
MOST_PARTS = 9000
"""Of an object, with some to spare."""
IN_FLIGHT = 12
"""Parts of a file under way at the same time: 60 MiB, or 0.14 % of a file so large that its parts
are larger than the smallest."""


def part_size(size: int) -> int:
    """Return the bytes of each part, but for the last, of a file of so many bytes."""
    return max(SMALLEST_PART, -(-size // MOST_PARTS))


def parts(size: int) -> Generator[slice]:
    """Yield where each part of a file of so many bytes lies."""
    step = part_size(size)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
