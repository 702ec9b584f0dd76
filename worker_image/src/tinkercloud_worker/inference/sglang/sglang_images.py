"""Prompts with images in SGLang's `/generate`: token ids with one placeholder per image, and files.

SGLang decodes the files itself, and repeats the placeholder as often as the model's processor says.
Releases that keep the other token ids as they are report as many prompt tokens as were meant; what
others do to the text would go unnoticed, so their answers are rejected.
"""

from base64 import b64encode
from typing import Any

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest
from tinkercloud_worker.inference.client import Json, ServerError


def prompt_fields(request: SamplingRequest) -> dict[str, Any]:
    """Return the fields of the prompt, once for each sample."""
    tokens: list[int] = request.prompt.tolist()
    files: list[str] = []
    # From the last one, so that the positions of the others stay valid.
    for image in reversed(request.images):
        del tokens[image.start + 1 : image.start + image.count]
        files.insert(0, b64encode(image.encoded).decode())
    fields: dict[str, Any] = {"input_ids": [tokens] * request.num_samples}
    if files:
        fields["image_data"] = [files] * request.num_samples
    return fields


def check_prompt(request: SamplingRequest, meta: Json, url: str) -> None:
    """Check that SGLang has read a prompt with images as it was meant (`meta_info`).

    Raises:
        ServerError: it has read another number of tokens.
    """
    if request.images and meta.get("prompt_tokens") != len(request.prompt):
        raise ServerError(
            f"the inference server {url} reads {meta.get('prompt_tokens')} tokens in a prompt with"
            f" images that has {len(request.prompt)}; use a release of SGLang that keeps token ids"
            " of prompts with images, and the processor files of the trained model"
        )


def reject_scoring(request: SamplingRequest) -> None:
    """Reject logprobs of a prompt with images.

    Raises:
        InvalidRequest: the prompt has images.
    """
    if request.images:
        raise InvalidRequest(
            "prompt_logprobs, topk_prompt_logprobs, target_prompt_logprobs: not supported for"
            " prompts with images, because this model's sampler is SGLang; use a forward pass of a"
            " training client, or a sampler with backend torch"
        )
