"""Files of all kinds become the pixels that transformers' processors or people see."""

import io
import json
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.requests.sampling_requests import SampleRequest, SamplingParams
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.pictures import encoded
from tinkercloud_testing.small_models.vision import prompt_of, reference_logits
from tinkercloud_worker.chat.chat_images import images_of, model_input
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.vision.prepared import PreparedImage
from tinkercloud_worker.vision.processor import VisionProcessor, load_processor

IMAGE_TOKEN = 90
WIDTH, HEIGHT = 84, 56
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 280 * 280,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
GEMMA = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}
FAMILIES = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN | {"patch_size": 16},
    "gemma3": GEMMA | {"do_convert_rgb": None},
}
"""Processors as they are published; that of Gemma 3 does not say that it converts to RGB."""


def a_folder(folder: Path, family: str) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": family, "image_token_id": IMAGE_TOKEN, "mm_tokens_per_image": 4}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FAMILIES[family]))
    return folder


def a_processor(folder: Path, family: str) -> VisionProcessor:
    processor = load_processor(str(a_folder(folder, family)))
    assert processor is not None
    return processor


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> VisionProcessor:
    return a_processor(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def strokes() -> npt.NDArray[np.uint8]:
    """Return a picture that no turn or mirror image equals: grey [H, W]."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    draw = ImageDraw.Draw(image)
    draw.line((5, 5, 70, 12), fill=0, width=3)
    draw.rectangle((8, 30, 30, 50), fill=90)
    return np.asarray(image)


def rgb(grey: npt.NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(np.repeat(grey[:, :, None], 3, 2))


def read(processor: VisionProcessor, data: bytes, *, seen: bool = False) -> PreparedImage:
    file_format = "png" if data.startswith(b"\x89PNG") else "jpeg"
    part = ImagePart(0, data, file_format, None, as_seen=seen)
    [image] = processor.prepare(np.array([1], np.int32), [part]).images
    return image


def plain(processor: VisionProcessor, image: Image.Image) -> PreparedImage:
    """Return what becomes of an image in RGB."""
    return read(processor, encoded(image, "png"))


# Files, and the RGB that both transformers and people see.


def on_transparent(mode: str) -> tuple[bytes, Image.Image]:
    """Black strokes on a transparent ground, which is black too where it can't be seen."""
    alpha = 255 - strokes()
    bands = [Image.fromarray(np.zeros_like(alpha))] * (len(mode) - 1)
    image = Image.merge(mode, [*bands, Image.fromarray(alpha)])
    return encoded(image, "png"), rgb(strokes())


def random_alpha() -> tuple[bytes, Image.Image]:
    values = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
    image = Image.fromarray(values)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return encoded(image, "png"), Image.alpha_composite(white, image).convert("RGB")


def opaque_alpha() -> tuple[bytes, Image.Image]:
    image = rgb(strokes())
    return encoded(image.convert("RGBA"), "png"), image


def palette(*, transparency: bytes | int | None) -> tuple[bytes, Image.Image]:
    image = Image.fromarray((strokes() > 128).astype(np.uint8), mode="P")
    image.putpalette([0, 0, 0, 200, 0, 0])
    file = io.BytesIO()
    kept = {} if transparency is None else {"transparency": transparency}
    image.save(file, format="png", **kept)
    ground = np.array([200, 0, 0])
    if transparency is not None:
        opacity = (transparency[1] if isinstance(transparency, bytes) else 0) / 255
        ground = np.round(ground * opacity + 255 * (1 - opacity))
    expected = np.where((strokes() > 128)[:, :, None], ground, 0).astype(np.uint8)
    return file.getvalue(), Image.fromarray(expected)


def one_transparent_color() -> tuple[bytes, Image.Image]:
    values = np.where((strokes() > 128)[:, :, None], (9, 8, 7), (1, 2, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="png", transparency=(9, 8, 7))
    values[strokes() > 128] = 255
    return file.getvalue(), Image.fromarray(values)


def one_transparent_grey() -> tuple[bytes, Image.Image]:
    values = np.where(strokes() > 128, 7, 60).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="png", transparency=7)
    return file.getvalue(), rgb(np.where(values == 7, 255, values).astype(np.uint8))


def of_mode(mode: str, file_format: str) -> tuple[bytes, Image.Image]:
    data = encoded(rgb(strokes()).convert(mode), file_format)
    return data, Image.open(io.BytesIO(data)).convert("RGB")


def animated() -> tuple[bytes, Image.Image]:
    first, second = rgb(strokes()), Image.new("RGB", (WIDTH, HEIGHT), (9, 9, 9))
    file = io.BytesIO()
    first.save(file, format="png", save_all=True, append_images=[second], duration=9)
    return file.getvalue(), first


def interlaced_colors_of_16_bits() -> tuple[bytes, Image.Image]:
    high = np.repeat(strokes()[:, :, None], 3, 2)
    low = np.random.default_rng(1).integers(0, 256, high.shape).astype(np.uint16)
    return png_of_16_bits(high.astype(np.uint16) << 8 | low), rgb(strokes())


def png_of_16_bits(values: npt.NDArray[np.integer[Any]], *extra: bytes) -> bytes:
    """Return a PNG file of 16-bit values [H, W] or [H, W, 3], which Pillow can't write."""
    kind = 0 if values.ndim == 2 else 2
    rows = values.astype(">u2").reshape(len(values), -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), *((each[:4], each[4:]) for each in extra)]
    chunks += [(b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


BOTH: dict[str, Callable[[], tuple[bytes, Image.Image]]] = {
    "black strokes on a transparent ground": lambda: on_transparent("RGBA"),
    "grey with alpha": lambda: on_transparent("LA"),
    "random colors and alpha": random_alpha,
    "opaque alpha": opaque_alpha,
    "palette": lambda: palette(transparency=None),
    "palette with a half transparent color": lambda: palette(transparency=b"\xff\x50"),
    "palette with one transparent color": lambda: palette(transparency=1),
    "one transparent color": one_transparent_color,
    "one transparent grey": one_transparent_grey,
    "1 bit": lambda: of_mode("1", "png"),
    "8-bit grey PNG": lambda: of_mode("L", "png"),
    "8-bit grey JPEG": lambda: of_mode("L", "jpeg"),
    "CMYK": lambda: of_mode("CMYK", "jpeg"),
    "YCbCr": lambda: of_mode("RGB", "jpeg"),
    "animated PNG": animated,
    "16-bit colors": interlaced_colors_of_16_bits,
}


@pytest.mark.parametrize("case", BOTH)
def test_every_kind_of_file_has_the_pixels_of_its_picture_on_white(
    processor: VisionProcessor, case: str
) -> None:
    data, expected = BOTH[case]()

    for seen in (False, True):
        image = read(processor, data, seen=seen)

        assert np.array_equal(image.pixels, plain(processor, expected).pixels)
        # Engines that decode the file by themselves see the same, whatever they do with alpha.
        shown = Image.open(io.BytesIO(image.encoded)).convert("RGB")
        assert np.array_equal(np.asarray(shown), np.asarray(expected))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", BOTH)
def test_chunks_of_the_sdk_are_read_as_the_processor_of_transformers_reads_the_file(
    case: str, family: str, tmp_path: Path
) -> None:
    data, _ = BOTH[case]()
    processor = a_processor(tmp_path / "model", family)
    load: Callable[..., Any] = AutoImageProcessor.from_pretrained
    reference = load(str(tmp_path / "model"), local_files_only=True)
    opened = Image.open(io.BytesIO(data))
    if family == "gemma3":
        # Its processor converts only if it is asked to; chat templates do.
        reference.do_convert_rgb = True

    theirs = reference([opened], return_tensors="np")["pixel_values"]

    assert np.array_equal(read(processor, data).pixels, theirs)


# Turned images.


def turned(orientation: int, file_format: str = "png") -> bytes:
    """Return a file whose picture, with this orientation of its EXIF data, is `strokes`."""
    upright = rgb(strokes())
    # The transposition that undoes each of the eight.
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    stored.save(file, format=file_format, exif=exif, quality=100, subsampling=0)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("file_format", ["png", "jpeg"])
def test_conversations_see_photos_upright(
    processor: VisionProcessor, orientation: int, file_format: str
) -> None:
    data = turned(orientation, file_format)

    image = read(processor, data, seen=True)

    expected = plain(processor, rgb(strokes()))
    near = 1e-6 if file_format == "png" else 0.3
    np.testing.assert_allclose(image.pixels, expected.pixels, atol=near)
    assert (image.grid, image.count) == (expected.grid, expected.count)
    for other in (image.encoded, data):
        opened = Image.open(io.BytesIO(other))
        assert other is data or opened.getexif().get(0x0112, 1) not in range(2, 9)


@pytest.mark.parametrize("orientation", [3, 6])
def test_chunks_of_the_sdk_are_not_turned(processor: VisionProcessor, orientation: int) -> None:
    data = turned(orientation)
    stored = Image.open(io.BytesIO(data)).convert("RGB")

    image = read(processor, data)

    assert np.array_equal(image.pixels, plain(processor, stored).pixels)
    # An engine that turns images by itself does not turn this one.
    assert Image.open(io.BytesIO(image.encoded)).getexif().get(0x0112) is None


def test_damaged_exif_data_turns_nothing(processor: VisionProcessor) -> None:
    file = io.BytesIO()
    rgb(strokes()).save(file, format="png", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")

    image = read(processor, file.getvalue(), seen=True)

    assert np.array_equal(image.pixels, plain(processor, rgb(strokes())).pixels)


def test_a_turned_transparent_picture_is_both(processor: VisionProcessor) -> None:
    data, expected = on_transparent("RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_90).save(
        file, format="png", exif=exif
    )

    image = read(processor, file.getvalue(), seen=True)

    assert np.array_equal(image.pixels, plain(processor, expected).pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turned_image_has_as_many_tokens_as_its_header_says(family: str, tmp_path: Path) -> None:
    processor = a_processor(tmp_path / "model", family)
    sizes = np.random.default_rng(0).integers(1, 500, (200, 2)).tolist()

    for width, height in [*sizes, [3000, 40], [28, 28], [14, 2700]]:
        if max(width, height) <= 200 * min(width, height):
            assert processor.num_tokens(width, height) == processor.num_tokens(height, width)


# 16 bits of grey.


@pytest.mark.parametrize("transparent", [False, True])
def test_conversations_see_16_bit_grey_as_grey(
    processor: VisionProcessor, transparent: bool
) -> None:
    values = strokes().astype(np.uint16) << 8 | 0x3F
    ground = int(values[0, 0])
    values[strokes() == 90] += 0x10
    extra = [b"tRNS" + struct.pack(">H", ground)] if transparent else []

    image = read(processor, png_of_16_bits(values, *extra), seen=True)

    assert np.array_equal(image.pixels, plain(processor, rgb(strokes())).pixels)


def test_chunks_of_the_sdk_clip_16_bit_grey_as_transformers_does(
    processor: VisionProcessor,
) -> None:
    data = png_of_16_bits(strokes().astype(np.uint16) << 8)
    clipped = Image.open(io.BytesIO(data)).convert("RGB")

    assert np.array_equal(read(processor, data).pixels, plain(processor, clipped).pixels)


# Unusual files.


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (150, 1), (2000, 30), (1000, 1000)])
def test_unusual_sizes_have_as_many_tokens_as_their_header_says(
    processor: VisionProcessor, size: tuple[int, int]
) -> None:
    data = encoded(Image.new("RGBA", size, (0, 0, 0, 0)), "png")

    image = read(processor, data, seen=True)

    assert image.count == processor.num_tokens(*size) == len(image.pixels) // 4
    assert len(np.unique(image.pixels)) == 3  # white, as each color is normalized by itself


@pytest.mark.parametrize("cut", [30, 60, 100])
@pytest.mark.parametrize("case", ["random colors and alpha", "CMYK", "animated PNG"])
def test_truncated_files_are_refused_by_name(
    processor: VisionProcessor, case: str, cut: int
) -> None:
    data, _ = BOTH[case]()
    damaged = data[: len(data) * cut // 200]

    for seen in (False, True):
        with pytest.raises(InvalidRequest, match="file"):
            read(processor, damaged, seen=seen)


# The way through a conversation, and through a model.


def test_images_of_conversations_are_read_as_people_see_them() -> None:
    data = turned(6)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    chunks = images_of([{"type": "image_url", "image_url": {"url": url}}], "here")

    prompt = model_input([1, 9, 2], chunks, 9)
    request = SampleRequest(
        sampling_session_id="s:sample:0",
        prompt=prompt,
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=1),
    )

    [image] = request.prompt.images()
    assert image.as_seen
    assert image.data == data
    sent = SampleRequest.model_validate(request.model_dump())
    assert not sent.prompt.images()[0].as_seen


@pytest.mark.parametrize("family", READS_IMAGES)
def test_logprobs_behind_a_transparent_image_equal_transformers(
    family: str, tmp_path: Path
) -> None:
    model = READS_IMAGES[family]()
    kind = model.config.model_type
    processor = a_processor(tmp_path / "model", "gemma3" if kind == "gemma3" else "qwen2_5_vl")
    data, expected = random_alpha()
    [image] = processor.prepare(
        np.array([1, 2], np.int32), [ImagePart(2, data, "png", None)]
    ).images
    load: Callable[..., Any] = AutoImageProcessor.from_pretrained
    reference = load(str(tmp_path / "model"), local_files_only=True)
    reference.do_convert_rgb = True
    theirs = reference([Image.open(io.BytesIO(data))], return_tensors="np")
    assert np.array_equal(image.pixels, theirs["pixel_values"])
    assert not np.array_equal(
        np.asarray(expected), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )
    length = 2 + image.count + 4
    tokens = prompt_of(length, [image])
    targets = np.random.default_rng(0).integers(0, 90, (length, 1))
    example = Example(
        tokens,
        targets,
        {"weights": np.ones((length, 1), np.float32)},
        is_flat=True,
        images=(image,),
    )
    trainer = TorchTrainer(TorchBaseModel(READS_IMAGES[family]()), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=2, seed=1))

    output = trainer.forward("m", Batch([example], "cross_entropy", forward_only=True))

    with torch.no_grad():
        logits = reference_logits(model, tokens, [image])
    chosen = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(targets))[:, 0]
    np.testing.assert_allclose(output.logprobs[0], chosen.numpy(), atol=1e-5)
