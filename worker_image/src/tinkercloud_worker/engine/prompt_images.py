"""Reads prompts with images, under the limits of a request.

What can be computed from the files' headers is checked first, so that nothing is decoded for a
request that would be rejected anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.requests.tensors import Int32Array
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.vision.prepared import PreparedPrompt


class ImageProcessor(Protocol):
    """The image processor of a vision-language model. Thread-safe."""

    @property
    def image_token(self) -> int:
        """Id of the placeholder token of images."""

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels.

        Raises:
            InvalidRequest: the model reads no images of this size.
        """

    def prepare(self, tokens: Int32Array, images: Sequence[ImagePart]) -> PreparedPrompt:
        """Decode the images of a prompt, and insert their placeholder tokens into its text.

        Raises:
            InvalidRequest: an image is damaged; the message begins with `image` and its index.
        """


class ImageBounds(Protocol):
    """Limits of the images of a request (`ImageLimits`)."""

    def check_images(self, images: Iterable[tuple[str, ImagePart]]) -> None:
        """Check the images of one request, each with its name for messages.

        Raises:
            InvalidRequest: there are too many, or one is too large.
        """


@dataclass(frozen=True, slots=True)
class PromptImages:
    """How the served model reads images."""

    processor: ImageProcessor | None = None
    """None if the model reads text only."""
    limits: ImageBounds | None = None
    """None for no limits."""
    refusal: str = "this model reads text only"
    """Why images are rejected, if there is no processor."""

    def placeholder(self, where: str) -> int:
        """Return the id of the placeholder token of images.

        Raises:
            InvalidRequest: the model reads text only.
        """
        return self._needed(where).image_token

    def check(self, prompts: Iterable[tuple[str, Sequence[ImagePart]]]) -> None:
        """Check the images of one request, without decoding any.

        Args:
            prompts: the images of each prompt, with its name for messages.

        Raises:
            InvalidRequest: the model reads no images, or there are too many or too large ones, or
                the client counts other tokens than the model's processor.
        """
        named = [
            (f"{where}: image {index}", image)
            for where, images in prompts
            for index, image in enumerate(images)
        ]
        if named:
            self._needed(named[0][0])
        if self.limits is not None:
            self.limits.check_images(named)
        for where, image in named:
            self._count(image, where)

    def length(self, num_tokens: int, images: Sequence[ImagePart], where: str) -> int:
        """Return the length of a prompt of so many text tokens, with the tokens of its images.

        Raises:
            InvalidRequest: as `check`.
        """
        counts = [
            self._count(image, f"{where}: image {index}") for index, image in enumerate(images)
        ]
        return num_tokens + sum(counts)

    def read(self, tokens: Int32Array, images: Sequence[ImagePart], where: str) -> PreparedPrompt:
        """Return a prompt with its decoded images.

        Args:
            tokens: its text, int32.
            images: its images, which have passed `check`.
            where: its name for messages.

        Raises:
            InvalidRequest: an image is damaged.
        """
        if not images:
            return PreparedPrompt(tokens)
        try:
            return self._needed(where).prepare(tokens, images)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}") from None

    def _count(self, image: ImagePart, where: str) -> int:
        """Return the number of tokens of an image."""
        width, height = image.size
        try:
            counted = self._needed(where).num_tokens(width, height)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}") from None
        if image.expected_tokens not in {None, counted}:
            raise InvalidRequest(
                f"{where}: expected_tokens is {image.expected_tokens}, but this model's processor"
                f" makes {counted} tokens of an image of {width} x {height} pixels; count them with"
                " the image processor of the served model (the service's /hf has its files)"
            )
        return counted

    def _needed(self, where: str) -> ImageProcessor:
        if self.processor is None:
            raise InvalidRequest(f"{where}: {self.refusal}")
        return self.processor


TEXT_ONLY = PromptImages()
"""A model that reads text only."""
