"""Images in conversations: OpenAI's parts of type `image_url`, and where they are in a prompt.

The model gets what people see when they open the file.

https://platform.openai.com/docs/guides/images-vision
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinkercloud_protocol.requests.image_files import ImagePart, image_chunk_at
from tinkercloud_protocol.requests.sampling_requests import Chunk, ModelInput
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.shown import shown

Content = str | Sequence[dict[str, Any]] | None
"""The content of a message: text, or parts."""
_KIND = "image_url"


class SeenInput(ModelInput):
    """A prompt whose images are read as people see them."""

    def images(self) -> tuple[ImagePart, ...]:
        """See `ModelInput`."""
        return tuple(replace(image, as_seen=True) for image in super().images())


def images_of(content: Content, where: str) -> list[Chunk]:
    """Return the images of a message, in order.

    Args:
        content: the message's content.
        where: its name, for messages.

    Raises:
        InvalidRequest: one of them is not a `data:` URL, or no image.
    """
    if content is None or isinstance(content, str):
        return []
    return [
        _image(part, f"{where}.{place}.image_url")
        for place, part in enumerate(content)
        if part.get("type") == _KIND
    ]


def _image(part: dict[str, Any], where: str) -> Chunk:
    image = part.get(_KIND)
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(image, dict) or not isinstance(url, str):
        raise InvalidRequest(f"{where}: must be an object with a url, a string")
    if image.get("detail", "auto") != "auto":
        raise InvalidRequest(
            f"{where}.detail: not supported, since images are read in the size of their file; leave"
            " it out, and resize the image"
        )
    if url[:5].lower() != "data:":
        raise InvalidRequest(
            f"{where}.url: this server opens no addresses, got {shown(url)}; send it as a data: URL"
            " (data:image/png;base64,...)"
        )
    return Chunk.model_validate(image_chunk_at(url, where))


def content_for_template(content: Content, where: str) -> str | list[dict[str, str]]:
    """Return the content of a message as chat templates of transformers receive it.

    Content without images is a text, since many templates accept nothing else.

    Args:
        content: the message's content.
        where: its name, for messages.

    Raises:
        InvalidRequest: a part is neither a text nor an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        kind, text = part.get("type"), part.get("text")
        if kind == _KIND:
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            raise InvalidRequest(
                f"{where}: this server does not support parts of type {str(kind)[:40]!r}; send"
                " parts of type 'text' with a text, or of type 'image_url'"
            )
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def model_input(tokens: Sequence[int], images: Sequence[Chunk], placeholder: int) -> ModelInput:
    """Return a prompt as asample receives it.

    Args:
        tokens: the rendered conversation, with one placeholder for each image.
        images: the images, in order.
        placeholder: id of the placeholder token.

    Raises:
        InvalidRequest: the conversation has another number of placeholders.
    """
    places = [place for place, token in enumerate(tokens) if token == placeholder]
    if len(places) != len(images):
        raise InvalidRequest(
            f"messages: the model's chat template makes {len(places)} placeholders for"
            f" {len(images)} images; remove text that looks like a placeholder, and send images"
            " only in messages for which the template has them (role user)"
        )
    chunks, done = [], 0
    for place, image in zip(places, images, strict=True):
        chunks += [Chunk(tokens=list(tokens[done:place])), image]
        done = place + 1
    return SeenInput(chunks=[*chunks, Chunk(tokens=list(tokens[done:]))])
