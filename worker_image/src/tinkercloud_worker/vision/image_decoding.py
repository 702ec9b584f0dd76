"""Decodes image files to RGB: as transformers' processors read a file, or as people see it.

Both put transparent images on white. People also see an image turned as its EXIF data says, and
16-bit grey as grey, which Pillow would clip to white.

EXIF orientation: CIPA DC-008, 4.6.4.
"""

import io

import numpy as np
from PIL import ExifTags, Image
from transformers.image_transforms import convert_to_rgb

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.wire.errors import InvalidRequest

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image of an orientation upright."""
_WHITE = 255
_BITS_OF_PIXELS = 8


def decode(image: ImagePart, where: str) -> tuple[Image.Image, bytes]:
    """Return an image in RGB, and a file of the same pixels for engines that decode it themselves.

    The file is the received one, unless decoders disagree about what it shows.

    Args:
        image: the image.
        where: its name, for messages.

    Raises:
        InvalidRequest: it is damaged, or its size is not that of its header.
    """
    try:
        with Image.open(io.BytesIO(image.data), formats=[image.format.upper()]) as opened:
            size = opened.size
            if size == image.size:
                return _decoded(opened, image)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise anything for damaged files
        raise InvalidRequest(
            f"{where}: the {image.format} file can't be decoded: {error}"
        ) from None
    raise InvalidRequest(f"{where}: the file has {size} pixels, but its header states {image.size}")


def _decoded(opened: Image.Image, image: ImagePart) -> tuple[Image.Image, bytes]:
    opened.load()
    orientation = _orientation(opened)
    is_plain = opened.mode in {"L", "RGB"} and "transparency" not in opened.info
    shown = opened
    if image.as_seen:
        shown = _scaled(opened)
        if orientation in _TURNS:
            shown = shown.transpose(_TURNS[orientation])
    decoded = Image.fromarray(np.asarray(convert_to_rgb(shown, return_numpy=True)))
    if is_plain and orientation not in _TURNS:
        return decoded, image.data
    file = io.BytesIO()
    decoded.save(file, format="png", compress_level=1)
    return decoded, file.getvalue()


def _orientation(image: Image.Image) -> int | None:
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - damaged EXIF data raises anything, and programs ignore it
        return None
    return found if isinstance(found, int) else None


def _scaled(image: Image.Image) -> Image.Image:
    """Return 16-bit grey as 8-bit grey on white, with the upper bits, as Pillow reads colors."""
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    grey = (values >> _BITS_OF_PIXELS).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[values == transparent] = _WHITE
    return Image.fromarray(grey)
