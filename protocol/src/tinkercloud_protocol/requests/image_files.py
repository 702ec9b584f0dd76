"""Images in prompts: which files are accepted, and what is checked before any is decoded.

An image is a PNG or JPEG file. Its format follows from its first bytes, and its size from its
header, so a file that would expand to gigabytes is rejected while it is small. Only images that the
request contains are accepted: the service opens no address that a client names.

PNG: https://www.w3.org/TR/png-3/. JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B.
"""

import binascii
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.shown import shown

FORMATS = ("png", "jpeg")
TEXT, IMAGE, ASSET_POINTER = "encoded_text", "image", "image_asset_pointer"
"""Types of chunks."""
IMAGE_MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3"})
"""Values of `model_type` in `config.json` whose images are read, if the model's folder has a
`preprocessor_config.json`."""
MAX_EXPECTED_TOKENS = 2**31 - 1

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_MAGIC = {
    _PNG: "png",
    _JPEG: "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
_MAX_SEGMENTS = 4096
"""Segments of a JPEG file before its image data; cameras write a few dozen."""
_START_OF_SCAN = 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the segments that state an image's size."""
_WITHOUT_LENGTH = frozenset([0x01, *range(0xD0, 0xD9)])


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a prompt, as received."""

    offset: int
    """Number of text tokens of the prompt before the image. Several images may share an offset;
    they are in order."""
    data: bytes
    """The encoded file."""
    format: str
    """"png" or "jpeg"."""
    expected_tokens: int | None
    """The tokens that the client counts for it."""
    as_seen: bool = False
    """Whether it is read as people see it: turned as its EXIF data says, and with 16-bit grey as
    grey. Otherwise as transformers' processor reads the file."""

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height in pixels, according to its header, before it is turned.

        Raises:
            InvalidRequest: the file has no complete header.
        """
        return header_size(self.data, self.format)


def read_image(
    data: bytes, file_format: str, expected_tokens: int | None, offset: int, where: str
) -> ImagePart:
    """Return an image of a request after checking its format and header.

    Args:
        data: the encoded file.
        file_format: the format that the client states.
        expected_tokens: the tokens that the client counts for it.
        offset: number of text tokens before it.
        where: name of the chunk, for messages.

    Raises:
        InvalidRequest: the file is no image, or has another format than the client states.
    """
    if file_format not in FORMATS:
        raise InvalidRequest(
            f"{where}.format: must be 'png' or 'jpeg', got {shown(file_format)}; convert the image"
        )
    if expected_tokens is not None and not 1 <= expected_tokens <= MAX_EXPECTED_TOKENS:
        raise InvalidRequest(
            f"{where}.expected_tokens: must be at least 1, or absent, got {shown(expected_tokens)}"
        )
    found = _format_of(data)
    if found != file_format:
        raise InvalidRequest(
            f"{where}: format is {file_format!r}, but the data is"
            f" {'no known image format' if found is None else repr(found)} (it starts with"
            f" {data[:8].hex() or 'nothing'}); state the format of the file, or convert it"
        )
    try:
        header_size(data, file_format)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}") from None
    return ImagePart(offset, data, file_format, expected_tokens)


def read_json_image(chunk: Mapping[str, object], offset: int, where: str) -> ImagePart:
    """Return the image of a chunk in JSON.

    Its type is "image" (`data` in base64) or "image_asset_pointer" (`location`); both have `format`
    and may have `expected_tokens`.

    Args:
        chunk: the chunk.
        offset: number of text tokens before it.
        where: name of the chunk, for messages.

    Raises:
        InvalidRequest: it has another type, a field is invalid, or the file is (`read_image`).
    """
    kind, expected = chunk.get("type"), chunk.get("expected_tokens")
    if kind not in {IMAGE, ASSET_POINTER}:
        raise refuse_chunk(kind, where)
    if chunk.get("override_dimensions") is not None:
        raise refuse_override(where)
    if expected is not None and type(expected) is not int:
        raise InvalidRequest(f"{where}.expected_tokens: must be an integer, got {shown(expected)}")
    file_format = _text(chunk, "format", where)
    if kind == IMAGE:
        data = _decode_base64(_text(chunk, "data", where), f"{where}.data")
        return read_image(data, file_format, expected, offset, where)
    data, stated = _decode_location(_text(chunk, "location", where), where)
    if stated not in {None, file_format}:
        raise InvalidRequest(
            f"{where}: format is {file_format!r}, but location is a URL of {shown(stated)}; both"
            " must be the format of the file"
        )
    return read_image(data, file_format, expected, offset, where)


def image_chunk_at(location: str, where: str) -> dict[str, str]:
    """Return the chunk in JSON of an image at a `data:` URL, in the format of its file.

    Raises:
        InvalidRequest: the location is not a `data:` URL, or no image in an accepted format.
    """
    data, _ = _decode_location(location, where)
    file_format = _format_of(data) or "unknown"
    read_image(data, file_format, None, 0, where)
    return {"type": IMAGE, "data": b64encode(data).decode(), "format": file_format}


def _text(chunk: Mapping[str, object], key: str, where: str) -> str:
    value = chunk.get(key)
    if not isinstance(value, str):
        got = "nothing" if value is None else shown(value)
        raise InvalidRequest(f"{where}.{key}: required, and must be a string, got {got}")
    return value


def why_refused(kind: object) -> str:
    """Return why chunks of a type are not served."""
    if kind == "dmel":
        return (
            "chunk type 'dmel' (audio) is not supported: no served model reads audio; remove the"
            " chunk, or send its transcript as 'encoded_text'"
        )
    return f"chunk type {shown(kind)} is not supported; use {TEXT!r} or {IMAGE!r}"


def refuse_chunk(kind: object, where: str) -> InvalidRequest:
    """Return the error for a chunk of a type that is not served."""
    return InvalidRequest(f"{where}: {why_refused(kind)}")


def refuse_override(where: str) -> InvalidRequest:
    """Return the error for an image with other dimensions than those of its file."""
    return InvalidRequest(
        f"{where}.override_dimensions: not supported; resize the image before you send it, and"
        " leave this field out"
    )


def _decode_base64(text: str, where: str) -> bytes:
    """Return the bytes of base64 text.

    Raises:
        InvalidRequest: the text is not base64.
    """
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where}: must be base64, got {shown(text)}") from None


def _decode_location(location: str, where: str) -> tuple[bytes, str | None]:
    """Return the file of an asset pointer, and the format that its URL states, if any.

    Raises:
        InvalidRequest: the location is not a `data:` URL. Other addresses are never opened: the
            server could reach what the client must not.
    """
    if location[:5].lower() != "data:":
        raise InvalidRequest(
            f"{where}.location: only data: URLs are accepted (data:image/png;base64,...), since the"
            f" service opens no addresses or files, got {shown(location)}; send the file as an"
            f" {IMAGE!r} chunk"
        )
    header, comma, content = location[5:].partition(",")
    kind, *parameters = [part.strip().lower() for part in header.split(";")]
    if not comma or (kind and not kind.startswith("image/")):
        raise InvalidRequest(
            f"{where}.location: must be data:image/png;base64,... or data:image/jpeg;base64,...,"
            f" got {shown(location)}"
        )
    stated = kind.removeprefix("image/").replace("jpg", "jpeg") or None
    if parameters[-1:] == ["base64"]:
        return _decode_base64(content, f"{where}.location"), stated
    return unquote_to_bytes(content), stated


def _format_of(data: bytes) -> str | None:
    return next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)


def header_size(data: bytes, file_format: str) -> tuple[int, int]:
    """Return the width and height in pixels that the header of an image states.

    Raises:
        InvalidRequest: the header is incomplete or wrong.
    """
    try:
        width, height = _png_size(data) if file_format == "png" else _jpeg_size(data)
    except (IndexError, struct.error):
        raise InvalidRequest(
            f"the {file_format} file is damaged: it ends within its header ({len(data)} bytes)"
        ) from None
    if width == 0 or height == 0:
        raise InvalidRequest(f"the {file_format} file states a size of {width} x {height} pixels")
    return width, height


def _png_size(data: bytes) -> tuple[int, int]:
    length, kind, width, height = struct.unpack_from(">I4sII", data, len(_PNG))
    if (length, kind) != (13, b"IHDR"):
        raise InvalidRequest("the png file is damaged: it does not start with an IHDR chunk")
    return int(width), int(height)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Return the size stated before the first scan; there must be exactly one.

    Decoders disagree on which of several applies.
    """
    sizes: list[tuple[int, int]] = []
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if data[position] != 0xFF:
            raise InvalidRequest(f"the jpeg file is damaged: no marker at byte {position}")
        marker = data[position + 1]
        if marker == _START_OF_SCAN:
            if len(sizes) != 1:
                raise InvalidRequest(f"the jpeg file has {len(sizes)} frame headers, not one")
            return sizes[0]
        if marker == 0xFF:
            position += 1
            continue
        position += 2
        if marker in _WITHOUT_LENGTH:
            continue
        (length,) = struct.unpack_from(">H", data, position)
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 3)
            sizes.append((width, height))
        position += max(length, 2)
    raise InvalidRequest(
        f"the jpeg file has more than {_MAX_SEGMENTS} segments before its image data"
    )
