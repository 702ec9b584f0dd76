"""Prompts with images become engine rows: positions, counts, limits and errors."""

import json
import struct
import zlib
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_protocol.requests.image_limits import ImageLimits
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.requests.tensors import Datum, ForwardBackwardRequest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.pictures import picture
from tinkercloud_worker.engine.batch import Batch, ModelLimits, prepare
from tinkercloud_worker.engine.prompt_images import PromptImages
from tinkercloud_worker.engine.sampling import sampling_request
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest
from tinkercloud_worker.vision.processor import VisionProcessor, load_processor

IMAGE_TOKEN, VIDEO_TOKEN = 90, 91
LIMITS = ModelLimits(vocab_size=100, max_context_length=40)
WIDE, TALL = picture(84, 56), picture(56, 140, seed=1, file_format="jpeg")
"""Images of 6 and 10 tokens; a token is 28 x 28 pixels."""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 256 * 256,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> PromptImages:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert load_processor(str(folder)) is None
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = load_processor(str(folder))
    assert isinstance(processor, VisionProcessor)
    return PromptImages(processor, ImageLimits())


def a_batch(images: PromptImages, parts: list[ImagePart], *, text: list[int], length: int) -> Batch:
    tokens = np.array(text, np.int32)
    datum = Datum(tokens, {"target_tokens": np.zeros(length, np.int64)}, tuple(parts))
    request = ForwardBackwardRequest("m", 1, (datum,), "cross_entropy", {}, forward_only=False)
    return prepare(request, LIMITS, images)


def a_sample(images: PromptImages, *chunks: dict[str, Any], **fields: Any) -> SamplingRequest:
    content = {
        "sampling_session_id": "s:sample:0",
        "prompt": {"chunks": list(chunks)},
        "sampling_params": {"max_tokens": 1},
        **fields,
    }
    request = SampleRequest.model_validate(content)
    return sampling_request.prepare(request, LIMITS, frozenset(), 0, images=images)


def chunk(data: bytes, file_format: str, **fields: Any) -> dict[str, Any]:
    content = b64encode(data).decode()
    return {"type": "image", "data": content, "format": file_format, **fields}


def test_placeholders_stand_where_the_images_are(images: PromptImages) -> None:
    parts = [ImagePart(1, WIDE, "png", 6), ImagePart(1, TALL, "jpeg", None)]

    [example] = a_batch(images, parts, text=[5, 6, 7], length=19).examples

    assert example.tokens.tolist() == [5, *[IMAGE_TOKEN] * 16, 6, 7]
    assert [(image.start, image.count) for image in example.images] == [(1, 6), (7, 10)]
    assert [image.grid for image in example.images] == [(1, 4, 6), (1, 10, 4)]
    assert [image.pixels.shape for image in example.images] == [(24, 1176), (40, 1176)]
    assert [image.encoded for image in example.images] == [WIDE, TALL]


def test_samples_read_the_same_prompt_as_training(images: PromptImages) -> None:
    parts = [ImagePart(2, WIDE, "png", 6)]
    [example] = a_batch(images, parts, text=[5, 6, 7], length=9).examples

    request = a_sample(
        images,
        {"type": "encoded_text", "tokens": [5, 6]},
        chunk(WIDE, "png", expected_tokens=6),
        {"type": "encoded_text", "tokens": [7]},
        prompt_logprobs=True,
    )

    assert request.prompt.tolist() == example.tokens.tolist()
    assert request.images[0].fingerprint == example.images[0].fingerprint
    assert request.num_bytes == request.prompt.nbytes + example.images[0].pixels.nbytes


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400))
def test_the_count_from_the_header_is_that_of_the_pixels(
    images: PromptImages, width: int, height: int
) -> None:
    part = ImagePart(0, picture(width, height), "png", None)
    processor = images.processor
    assert processor is not None
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequest, match="rejects an image of"):
            processor.num_tokens(width, height)
        return

    [made] = processor.prepare(np.array([1], np.int32), [part]).images

    assert processor.num_tokens(width, height) == made.count == len(made.pixels) // 4


@pytest.mark.parametrize(
    ("part", "text", "length", "message"),
    [
        (
            ImagePart(1, WIDE, "png", 7),
            [5],
            8,
            "data[0].model_input: image 0: expected_tokens is 7, but this model's processor makes"
            " 6 tokens of an image of 84 x 56 pixels",
        ),
        (
            ImagePart(1, WIDE, "png", 6),
            [5],
            2,
            "data[0].loss_fn_inputs['target_tokens'] has 2 positions, but model_input has 7 tokens",
        ),
        (
            ImagePart(1, picture(210, 210), "png", None),
            [5],
            50,
            "data[0].model_input: must have 1 to 40 tokens, got 65",
        ),
        (
            ImagePart(1, WIDE[:-400], "png", 6),
            [5],
            7,
            "data[0].model_input: image 0: the png file can't be decoded",
        ),
        (
            ImagePart(1, WIDE, "png", 6),
            [IMAGE_TOKEN],
            7,
            f"data[0].model_input: token {IMAGE_TOKEN} is a placeholder of images",
        ),
    ],
)
def test_a_wrong_image_of_a_datum_is_rejected_by_name(
    images: PromptImages, part: ImagePart, text: list[int], length: int, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        a_batch(images, [part], text=text, length=length)

    assert message in caught.value.message


def test_a_model_of_text_rejects_images(images: PromptImages) -> None:
    with pytest.raises(InvalidRequest, match="prompt: image 0: this model reads text only"):
        a_sample(PromptImages(), chunk(WIDE, "png"))

    assert a_sample(PromptImages(), {"tokens": [1]}).images == ()
    assert len(a_sample(images, chunk(WIDE, "png")).images) == 1


def test_limits_count_the_images_of_all_prompts(images: PromptImages) -> None:
    bounded = PromptImages(images.processor, ImageLimits(max_images=1))
    part = ImagePart(1, WIDE, "png", 6)
    datum = Datum(np.array([5], np.int32), {"target_tokens": np.zeros(7, np.int64)}, (part,))
    request = ForwardBackwardRequest("m", 1, (datum, datum), "cross_entropy", {}, forward_only=True)

    assert prepare(request, LIMITS, images).num_tokens == 14
    with pytest.raises(InvalidRequest, match=r"data\[1\].model_input: image 0: .*at most 1 images"):
        prepare(request, LIMITS, bounded)


def test_an_image_whose_decoder_fails_in_any_way_is_rejected_by_name(images: PromptImages) -> None:
    content = picture(84, 56)
    # An empty colour profile after the pixels makes the decoder read beyond its end.
    empty = struct.pack(">I4sI", 0, b"iCCP", zlib.crc32(b"iCCP"))
    end = content.index(b"IEND") - 4

    with pytest.raises(InvalidRequest, match="image 0: the png file can't be decoded"):
        a_sample(images, chunk(content[:end] + empty + content[end:], "png"))
