"""Limits the memory and the threads that decoding images takes.

A file of a few kilobytes may have millions of pixels, so the size of a request says nothing about
what its images take when they are decoded. Other requests must not wait for them either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.requests.image_limits import ImageLimits
from tinkercloud_worker.head.wire.body_limiter import BodyLimiter

T = TypeVar("T")

_BYTES_PER_PIXEL = 24
"""Three colors in float32, twice, since the vision towers of videos read pairs of frames."""
_THREADS = 2


class ImageWork:
    """Decodes images in its own threads. Belongs to one event loop."""

    def __init__(self, max_pixels: int = ImageLimits().max_request_pixels) -> None:
        """Start without work.

        Args:
            max_pixels: pixels that the training batches of one owner may have in memory; a larger
                batch is alone.
        """
        self._limiter = BodyLimiter(max_pixels * _BYTES_PER_PIXEL)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")

    async def run(self, num_images: int, job: Callable[[], T]) -> T:
        """Run a job in a thread; those that decode images have threads of their own.

        Args:
            num_images: how many images it decodes.
            job: the job.
        """
        threads = self._threads if num_images else None
        return await asyncio.get_running_loop().run_in_executor(threads, job)

    @asynccontextmanager
    async def room(self, owner: str, images: Sequence[ImagePart]) -> AsyncIterator[None]:
        """Wait until an owner has room for these decoded images, and keep it for the context."""
        if not images:
            yield
            return
        pixels = sum(width * height for width, height in (image.size for image in images))
        async with self._limiter.reserve(owner, pixels * _BYTES_PER_PIXEL):
            yield
