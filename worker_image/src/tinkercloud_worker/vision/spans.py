"""Where the images of sequences stand in a pass: rows, rotary positions, and attention.

Shape legend: N tokens of a prompt, R rows of a pass, L keys that they read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinkercloud_worker.vision.prepared import PreparedImage

Images = tuple[PreparedImage, ...]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The part of a sequence that a pass computes; the part before it is in a cache."""

    start: int
    stop: int
    images: Images
    """All images of the sequence; a pass computes all of a block of them or nothing of it."""


def rows_of(spans: Sequence[ImageSpan]) -> Iterator[tuple[int, PreparedImage]]:
    """Yield the images that a pass computes, in order, each with its first row."""
    first = 0
    for span in spans:
        for image in span.images:
            if span.start <= image.start and end_of(image) <= span.stop:
                yield first + image.start - span.start, image
        first += span.stop - span.start


def end_of(image: PreparedImage) -> int:
    """Return the position after an image."""
    return image.start + image.count


def blocks(images: Images) -> list[range]:
    """Return the positions of images; those without a token between them are one block.

    The tokens of a block see each other (Gemma 3), as in transformers, which knows runs of
    placeholders only.
    """
    found: list[range] = []
    for image in images:
        is_next = bool(found) and found[-1].stop == image.start
        start = found.pop().start if is_next else image.start
        found.append(range(start, end_of(image)))
    return found


def around(images: Images, position: int) -> range | None:
    """Return the block of images with placeholders on both sides of a position."""
    return next((each for each in blocks(images) if each.start < position < each.stop), None)


def rope_positions(length: int, images: Images, merge: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions [3, N] of Qwen-VL prompts: in time, height and width.

    Text counts on in all three; the tokens of an image lie on a grid that starts at the next
    position, and the text after it continues behind the grid's longest side.

    Args:
        length: tokens of the prompt.
        images: its images.
        merge: patches per token, in each direction.
    """
    parts: list[npt.NDArray[np.int64]] = []
    done = position = 0
    for image in images:
        parts.append(_text(position, image.start - done))
        position += image.start - done
        frames, rows, columns = _grid(image, merge)
        parts.append(np.indices((frames, rows, columns)).reshape(3, -1) + position)
        position += max(rows, columns)
        done = end_of(image)
    parts.append(_text(position, length - done))
    return np.concatenate(parts, axis=1)


def rope_shift(images: Images, merge: int) -> int:
    """Return the difference of a token's rotary position and its index, after all images."""
    shift = 0
    for image in images:
        _, rows, columns = _grid(image, merge)
        shift += max(rows, columns) - image.count
    return shift


def _grid(image: PreparedImage, merge: int) -> tuple[int, int, int]:
    if image.grid is None:
        raise ValueError("an image without a grid of patches has no rotary positions of its own")
    frames, rows, columns = image.grid
    return frames, rows // merge, columns // merge


def _text(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, first + count), (3, count))


def visible(span: ImageSpan, window: int | None) -> npt.NDArray[np.bool_]:
    """Return which keys each row sees, [R, L], where the tokens of a block see each other.

    Args:
        span: the part of a sequence that a pass computes.
        window: number of positions visible to each, including itself; None for all before it.
    """
    block_of_L = np.full(span.stop, -1)
    for number, block in enumerate(blocks(span.images)):
        block_of_L[block.start : block.stop] = number
    block_of_R = block_of_L[span.start :, None]
    query_R1, key_L = np.arange(span.start, span.stop)[:, None], np.arange(span.stop)
    seen: npt.NDArray[np.bool_] = (key_L <= query_R1) | (
        (block_of_R == block_of_L) & (block_of_R >= 0)
    )
    if window is not None:
        seen &= key_L > query_R1 - window
    return seen
