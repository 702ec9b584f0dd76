"""Cuts decoded images into the patches that a model's vision tower reads.

The model's own processor of transformers does the arithmetic, so that counts and pixels are those
of the client, which uses the same one.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES, ImagePart
from tinkercloud_protocol.requests.tensors import FloatArray, Int32Array
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.vision.image_decoding import decode
from tinkercloud_worker.vision.prepared import PreparedImage, PreparedPrompt


class ImageReader(Protocol):
    """What a family's tower reads of an image. Thread-safe."""

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels.

        It is the same for an image that is turned by 90 degrees, which may happen when it is
        decoded.

        Raises:
            ValueError: the family reads no images of this size.
        """

    def read(self, image: Image.Image) -> tuple[FloatArray, tuple[int, int, int] | None]:
        """Return its pixels, and its patches in time, height and width if it is cut into some."""


class PatchProcessor(Protocol):
    """An image processor of transformers for the Qwen-VL family."""

    merge_size: int

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: dict[str, Any]
    ) -> int:
        """Return the number of patches of an image of this size in pixels."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> Any:  # noqa: ANN401
        """Return `pixel_values` and `image_grid_thw`."""


class Patches:
    """Images cut into patches, as many as their size needs: the Qwen-VL family."""

    def __init__(self, processor: PatchProcessor) -> None:
        self._processor = processor

    def num_tokens(self, width: int, height: int) -> int:
        """See `ImageReader`."""
        patches = self._processor.get_number_of_image_patches(height, width, {})
        return patches // self._processor.merge_size**2

    def read(self, image: Image.Image) -> tuple[FloatArray, tuple[int, int, int] | None]:
        """See `ImageReader`."""
        made = self._processor([image], return_tensors="np")
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], np.float32), (frames, rows, columns)


class WholeImages:
    """Images of one size after scaling, each of as many tokens: Gemma 3.

    Images are never cropped (`do_pan_and_scan`): crops would be images of their own in the prompt.
    """

    def __init__(self, processor: Callable[..., Any], count: int) -> None:
        self._processor = processor
        self._count = count

    def num_tokens(self, width: int, height: int) -> int:
        """See `ImageReader`."""
        del width, height
        return self._count

    def read(self, image: Image.Image) -> tuple[FloatArray, tuple[int, int, int] | None]:
        """See `ImageReader`."""
        made = self._processor([image], do_pan_and_scan=False, return_tensors="np")
        return np.asarray(made["pixel_values"], np.float32), None


class VisionProcessor:
    """The image processor of a served model. Thread-safe."""

    def __init__(self, reader: ImageReader, image_token: int, reserved: frozenset[int]) -> None:
        """Create a processor.

        Args:
            reader: reads the images of the model's family.
            image_token: id of the placeholder token of an image.
            reserved: ids of placeholder tokens, which text must not contain.
        """
        self._reader = reader
        self.image_token = image_token
        self._reserved = reserved

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels.

        Raises:
            InvalidRequest: the model reads no images of this size.
        """
        try:
            return self._reader.num_tokens(width, height)
        except ValueError as error:
            raise InvalidRequest(
                f"the model's processor rejects an image of {width} x {height} pixels: {error}"
            ) from None

    def prepare(self, tokens: Int32Array, images: Sequence[ImagePart]) -> PreparedPrompt:
        """Decode the images of a prompt, and insert their placeholder tokens into its text.

        Args:
            tokens: the text, int32.
            images: the images, in order.

        Raises:
            InvalidRequest: an image is damaged, or the text contains a placeholder.
        """
        found = self._reserved.intersection(np.unique(tokens).tolist()) if images else ()
        if found:
            raise InvalidRequest(
                f"token {min(found)} is a placeholder of images, which this model's prompts get for"
                " each image; remove it from the text"
            )
        parts: list[Int32Array] = []
        prepared: list[PreparedImage] = []
        done = length = 0
        for index, image in enumerate(images):
            text = tokens[done : image.offset]
            done, start = image.offset, length + len(text)
            made = self._prepared(image, index, start)
            prepared.append(made)
            parts += [text, np.full(made.count, self.image_token, np.int32)]
            length = start + made.count
        return PreparedPrompt(
            np.concatenate([*parts, tokens[done:]], dtype=np.int32), tuple(prepared)
        )

    def _prepared(self, image: ImagePart, index: int, start: int) -> PreparedImage:
        decoded, file = decode(image, f"image {index}")
        pixels, grid = self._reader.read(decoded)
        pixels = np.ascontiguousarray(pixels)
        known = repr((pixels.shape, grid)).encode()
        return PreparedImage(
            start=start,
            count=self.num_tokens(*image.size),
            pixels=pixels,
            grid=grid,
            fingerprint=hashlib.blake2b(known + pixels.tobytes(), digest_size=16).digest(),
            encoded=file,
        )


def load_processor(path: str) -> VisionProcessor | None:
    """Return the image processor of a model.

    Args:
        path: the model's folder in Hugging Face layout.

    Returns:
        None if the model reads text only, or its folder has no `preprocessor_config.json`.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    has_processor = (Path(path) / "preprocessor_config.json").is_file()
    if config.model_type not in IMAGE_MODEL_TYPES or not has_processor:
        return None
    load: Callable[..., Any] = AutoImageProcessor.from_pretrained
    processor = load(path, local_files_only=True)
    reader: ImageReader = (
        WholeImages(processor, int(config.mm_tokens_per_image))
        if config.model_type == "gemma3"
        else Patches(processor)
    )
    names = ("image_token_id", "video_token_id")
    reserved = frozenset(int(getattr(config, name)) for name in names if hasattr(config, name))
    return VisionProcessor(reader, int(config.image_token_id), reserved)
