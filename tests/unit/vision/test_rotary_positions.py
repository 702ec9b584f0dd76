"""Rotary positions of prompts with images against those of transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.vision import image_arguments, prompt_of, qwen_image
from tinkercloud_worker.vision.spans import rope_positions, rope_shift

MODELS = {name: READS_IMAGES[name]() for name in ("Qwen2.5-VL", "Qwen3-VL")}
SIZES = st.integers(1, 4).map(lambda size: 2 * size)
PLACED = st.tuples(st.integers(1, 4), SIZES, SIZES)
"""Tokens of text before an image, and its patches in height and width."""


@pytest.mark.parametrize("family", MODELS)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), SIZES, SIZES), min_size=1, max_size=3), st.integers(0, 4)
)
def test_positions_equal_those_of_transformers(
    family: str, placed: list[tuple[int, int, int]], rest: int
) -> None:
    images, length = [], 0
    for text, rows, columns in placed:
        images.append(qwen_image(length + text, rows, columns))
        length = images[-1].start + images[-1].count
    tokens = prompt_of(length + rest, images)
    arguments = image_arguments(tokens, images)
    del arguments["pixel_values"]

    expected, shift = MODELS[family].model.get_rope_index(**arguments)

    found = rope_positions(len(tokens), tuple(images), 2)
    assert torch.equal(torch.from_numpy(found), expected[:, 0])
    assert rope_shift(tuple(images), 2) == int(shift)


def test_images_without_text_between_them_have_a_grid_each() -> None:
    first, second = qwen_image(1, 2, 4), qwen_image(3, 4, 2)

    positions = rope_positions(6, (first, second), 2)

    height_and_width = [[0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]
    np.testing.assert_array_equal(positions, [[0, 1, 1, 3, 3, 5], *height_and_width])
