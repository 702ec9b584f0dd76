"""Prompts with images as SGLang receives them."""

from base64 import b64decode

import numpy as np
import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, StopRules
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.sglang.sglang_images import (
    check_prompt,
    prompt_fields,
    reject_scoring,
)
from tinkercloud_worker.vision.prepared import PreparedImage

PAD = 99


def an_image(start: int, count: int, encoded: bytes) -> PreparedImage:
    pixels = np.zeros((count * 4, 12), np.float32)
    return PreparedImage(start, count, pixels, (1, 2, 2 * count), encoded, encoded)


def a_request(prompt: list[int], *images: PreparedImage) -> SamplingRequest:
    return SamplingRequest(
        prompt=np.array(prompt, np.int32),
        num_samples=2,
        max_tokens=4,
        seed=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        stop=StopRules(frozenset(), ()),
        images=images,
    )


REQUEST = a_request(
    [1, PAD, PAD, PAD, 2, 3, PAD, PAD, 4], an_image(1, 3, b"first"), an_image(6, 2, b"second")
)


def test_each_image_is_one_placeholder_and_its_file() -> None:
    fields = prompt_fields(REQUEST)

    assert fields["input_ids"] == [[1, PAD, 2, 3, PAD, 4]] * 2
    assert [list(map(b64decode, files)) for files in fields["image_data"]] == [
        [b"first", b"second"]
    ] * 2


def test_a_prompt_of_text_has_no_field_for_images() -> None:
    assert prompt_fields(a_request([1, 2])) == {"input_ids": [[1, 2]] * 2}


def test_an_answer_to_a_prompt_of_another_length_is_rejected() -> None:
    check_prompt(REQUEST, {"prompt_tokens": 9}, "http://engine")
    check_prompt(a_request([1, 2]), {}, "http://engine")

    with pytest.raises(ServerError, match="reads 10 tokens in a prompt with images that has 9"):
        check_prompt(REQUEST, {"prompt_tokens": 10}, "http://engine")


def test_scores_of_a_prompt_with_images_are_rejected() -> None:
    reject_scoring(a_request([1, 2]))

    with pytest.raises(InvalidRequest, match="not supported for prompts with images"):
        reject_scoring(REQUEST)
