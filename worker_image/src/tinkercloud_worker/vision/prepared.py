"""Prompts with images, as engines compute them.

Shape legend: N tokens of a prompt, with those of its images.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image of a prompt, decoded and cut into patches."""

    start: int
    """Position of its first placeholder token in the prompt."""
    count: int
    """Number of its placeholder tokens."""
    pixels: npt.NDArray[np.float32]
    """What the model's processor makes of it, in the shape that the vision tower reads."""
    grid: tuple[int, int, int] | None
    """Patches in time, height and width; None for towers that read whole images."""
    fingerprint: bytes
    """Equal for images with equal pixels."""
    encoded: bytes
    """A file of the same pixels, for engines that decode it themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A prompt with the placeholder tokens of its images: int32 [N]."""

    tokens: npt.NDArray[np.int32]
    images: tuple[PreparedImage, ...] = ()

    def without_pixels(self) -> "PreparedPrompt":
        """Return the prompt for comparison with others, without the content of its images."""
        nothing = np.empty(0, np.float32)
        images = [replace(image, pixels=nothing, encoded=b"") for image in self.images]
        return PreparedPrompt(self.tokens, tuple(images))
