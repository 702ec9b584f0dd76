"""Small image files."""

import io

import numpy as np
from PIL import Image


def picture(width: int, height: int, *, seed: int = 0, file_format: str = "png") -> bytes:
    """Return an image file ("png" or "jpeg") of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Image.fromarray(pixels), file_format)


def plain_picture(color: tuple[int, int, int], size: int, *, file_format: str = "jpeg") -> bytes:
    """Return a square image file of one color."""
    return encoded(Image.new("RGB", (size, size), color), file_format)


def encoded(image: Image.Image, file_format: str) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, format=file_format)
    return file.getvalue()
