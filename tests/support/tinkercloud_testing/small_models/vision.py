"""Tiny vision-language models with images, and what transformers computes with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkercloud_protocol.requests.tensors import Int32Array
from tinkercloud_testing.small_models.families import IMAGE_TOKEN
from tinkercloud_worker.engine.batch import Example
from tinkercloud_worker.vision.prepared import PreparedImage


def qwen_image(start: int, rows: int, columns: int, seed: int = 0) -> PreparedImage:
    """Return an image of so many patches of 14 x 14 pixels, merged by two in each direction."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(0, 1, (rows * columns, 3 * 2 * 14 * 14)).astype(np.float32)
    return PreparedImage(
        start=start,
        count=rows * columns // 4,
        pixels=pixels,
        grid=(1, rows, columns),
        fingerprint=f"{rows}x{columns} {seed}".encode(),
        encoded=b"",
    )


def gemma_image(start: int, seed: int = 0) -> PreparedImage:
    """Return an image of 28 x 28 pixels, which is 4 tokens."""
    pixels = np.random.default_rng(seed).normal(0, 1, (1, 3, 28, 28)).astype(np.float32)
    return PreparedImage(start, 4, pixels, None, f"gemma {seed}".encode(), b"")


def images_of(family: str) -> list[PreparedImage]:
    """Return two images for a prompt of at least 16 tokens."""
    if family.startswith("Gemma"):
        return [gemma_image(2, seed=1), gemma_image(9, seed=2)]
    return [qwen_image(2, 4, 6, seed=1), qwen_image(10, 6, 4, seed=2)]


def prompt_of(length: int, images: Sequence[PreparedImage], seed: int = 0) -> Int32Array:
    """Return random text with the placeholder tokens of images."""
    tokens = np.random.default_rng(seed).integers(0, IMAGE_TOKEN, length).astype(np.int32)
    for image in images:
        tokens[image.start : image.start + image.count] = IMAGE_TOKEN
    return tokens


def an_example(length: int, images: Sequence[PreparedImage], seed: int = 0) -> Example:
    """Return a prompt with images, random targets and random weights."""
    rng = np.random.default_rng(seed)
    return Example(
        prompt_of(length, images, seed),
        rng.integers(0, 90, (length, 1)),
        {"weights": rng.uniform(0, 1, (length, 1)).astype(np.float32)},
        is_flat=True,
        images=tuple(images),
    )


def examples_of(family: str) -> list[Example]:
    """Return text, a prompt with two images, text, and a prompt that ends in an image."""
    first, second = images_of(family)
    return [
        an_example(7, [], seed=3),
        an_example(20, [first, second], seed=4),
        an_example(9, [], seed=5),
        an_example(second.start + second.count, [second], seed=6),
    ]


def image_arguments(tokens: Int32Array, images: Sequence[PreparedImage]) -> dict[str, Any]:
    """Return the arguments of transformers' complete model for one prompt."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    arguments: dict[str, Any] = {"input_ids": ids}
    if not images:
        return arguments
    types = (ids == IMAGE_TOKEN).int()
    pixels = torch.cat([torch.from_numpy(image.pixels) for image in images])
    arguments["pixel_values"] = pixels
    if images[0].grid is None:
        return arguments | {"token_type_ids": types}
    grids = torch.tensor([image.grid for image in images])
    return arguments | {"image_grid_thw": grids, "mm_token_type_ids": types}


def reference_logits(
    model: Any,
    tokens: Int32Array,
    images: Sequence[PreparedImage],
) -> Tensor:
    """Return the logits [N, V] of transformers' complete model."""
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
    arguments: Mapping[str, Any] = image_arguments(tokens, images)
    logits: Tensor = model(**arguments, use_cache=False).logits[0]
    return logits
