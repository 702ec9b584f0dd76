"""How large the images of a request may be."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.wire.errors import InvalidRequest


class ImageLimits(BaseModel):
    """Upper bounds of images in prompts, checked before any image is decoded."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    max_images: Annotated[int, Field(ge=0)] = 1024
    """Maximum number of images in one request. 0: no images."""
    max_image_bytes: Annotated[int, Field(ge=1)] = 16 << 20
    """Maximum size of an image file in a request, in bytes."""
    max_image_pixels: Annotated[int, Field(ge=1)] = 1 << 24
    """Maximum size of an image in pixels (width times height), according to its header."""
    max_request_pixels: Annotated[int, Field(ge=1)] = 1 << 26
    """Maximum size of all images of a request in pixels. While the request is computed, each pixel
    takes up to 24 bytes, and with trainer ranks as much again in Ray's object store."""

    def check_images(self, images: Iterable[tuple[str, ImagePart]]) -> None:
        """Check the images of one request.

        Args:
            images: each image, with its name for messages.

        Raises:
            InvalidRequest: there are too many, or one is too large.
        """
        pixels = 0
        for index, (where, image) in enumerate(images):
            if index >= self.max_images:
                raise InvalidRequest(
                    f"{where}: a request may have at most {self.max_images} images"
                    " (limits.max_images); send fewer examples per request"
                )
            pixels += self._pixels_of(image, where)
            if pixels > self.max_request_pixels:
                raise InvalidRequest(
                    f"{where}: with it, the images of the request have {pixels} pixels; at most"
                    f" {self.max_request_pixels} are accepted (limits.max_request_pixels). Resize"
                    " the images, or send fewer per request"
                )

    def _pixels_of(self, image: ImagePart, where: str) -> int:
        if len(image.data) > self.max_image_bytes:
            raise InvalidRequest(
                f"{where}: the file has {len(image.data)} bytes; at most {self.max_image_bytes} are"
                " accepted (limits.max_image_bytes). Resize or compress the image"
            )
        width, height = image.size
        if width * height > self.max_image_pixels:
            raise InvalidRequest(
                f"{where}: the image has {width} x {height} pixels; at most"
                f" {self.max_image_pixels} are accepted (limits.max_image_pixels). Resize the image"
            )
        return width * height
