"""Images in conversations in OpenAI's format."""

from base64 import b64encode
from typing import Any

import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.pictures import picture
from tinkercloud_worker.chat.chat_images import content_for_template, images_of, model_input

PNG, JPEG = picture(30, 20), picture(20, 20, file_format="jpeg")
PAD = 9


def at(data: bytes, **fields: object) -> dict[str, Any]:
    url = f"data:image/x-unknown;base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_templates_get_a_place_for_each_image_and_the_files_stay_in_order() -> None:
    content = [text("a"), at(PNG), text("b"), at(JPEG, detail="auto")]

    parts = content_for_template(content, "here")
    chunks = images_of(content, "here")
    prompt = model_input([1, PAD, 2, 3, PAD], chunks, PAD)

    assert parts == [text("a"), {"type": "image"}, text("b"), {"type": "image"}]
    assert prompt.token_ids() == [1, 2, 3]
    images = [(part.offset, part.data, part.format) for part in prompt.images()]
    assert images == [(1, PNG, "png"), (3, JPEG, "jpeg")]


@pytest.mark.parametrize("content", ["ab", [text("a"), text("b")]])
def test_content_without_images_is_one_text(content: Any) -> None:
    assert content_for_template(content, "here") == "ab"
    assert images_of(content, "here") == []


WRONG: dict[str, dict[str, Any]] = {
    "here.0.image_url.url: this server opens no addresses, got 'https://ex": {
        "type": "image_url",
        "image_url": {"url": "https://example.com/a.png"},
    },
    "here.0.image_url: must be an object with a url": {"type": "image_url", "image_url": "x"},
    "here.0.image_url.detail: not supported": at(PNG, detail="high"),
    "here.0.image_url.format: must be 'png' or 'jpeg', got 'unknown'": at(b"GIF0"),
    "here.0.image_url.format: must be 'png' or 'jpeg', got 'gif'": at(b"GIF89a"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_image_is_rejected_by_name(message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        images_of([WRONG[message]], "here")

    assert message in caught.value.message


def test_text_that_looks_like_a_placeholder_is_rejected() -> None:
    [image] = images_of([at(PNG)], "here")

    with pytest.raises(InvalidRequest, match="makes 2 placeholders for 1 images"):
        model_input([1, PAD, PAD], [image], PAD)
    with pytest.raises(InvalidRequest, match="makes 0 placeholders for 1 images"):
        model_input([1], [image], PAD)


def test_other_parts_are_rejected_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"here: .* parts of type 'input_audio'"):
        content_for_template([text("a"), {"type": "input_audio"}], "here")
