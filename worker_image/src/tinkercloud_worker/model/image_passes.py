"""Passes over sequences with images: their embeddings, positions and masks.

Shape legend: B rows of a batch, T positions, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.packed_attention import mask_kinds
from tinkercloud_worker.model.architecture import split_vision
from tinkercloud_worker.vision.spans import Images, ImageSpan
from tinkercloud_worker.vision.tower import ImageInputs


class ImagePasses:
    """The images of one pass at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the towers out of a model, and let its embedding insert images."""
        self._tower = split_vision(model)
        self._mask_kinds = mask_kinds(model.config)
        self._inputs: ImageInputs | None = None
        self.insert_into(model)

    @property
    def are_read(self) -> bool:
        """Whether the model has a vision tower."""
        return self._tower is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of the vision tower."""
        return 0 if self._tower is None else self._tower.num_bytes

    def rope_shift(self, images: Images) -> int:
        """Return the rotary position of tokens after these images, less their index."""
        return self._tower.rope_shift(images) if images and self._tower is not None else 0

    def forget(self) -> None:
        """Free the features kept for later passes."""
        if self._tower is not None:
            self._tower.forget()

    def insert_into(self, model: PreTrainedModel) -> None:
        """Let the embedding of a model, this one or a copy, insert the images of its passes."""
        if self._tower is not None:
            model.get_input_embeddings().register_forward_hook(self._insert)

    @contextmanager
    def inserted(
        self, arguments: dict[str, Any], spans: Sequence[ImageSpan]
    ) -> Iterator[dict[str, Any]]:
        """Insert the images of sequences into a pass within this context.

        Args:
            arguments: the arguments of the backbone for a text of as many tokens.
            spans: the sequences of the pass.

        Returns:
            The arguments of the backbone for these sequences.

        Raises:
            ValueError: a sequence has images, but the model reads text only.
        """
        if not any(span.images for span in spans):
            yield arguments
            return
        if self._tower is None:
            raise ValueError("this model reads text only, but a sequence has images")
        inputs = self._tower.inputs(spans)
        own = self._tower.arguments(spans, self._mask_kinds)
        if inputs is not None:
            own |= inputs.arguments(arguments["input_ids"].shape[1])
        self._inputs = inputs
        try:
            yield arguments | own
        finally:
            self._inputs = None

    def _insert(self, _module: nn.Module, _ids: object, found_BTD: Tensor) -> Tensor:
        """Replace the embeddings of placeholder tokens by those of images (a forward hook)."""
        return found_BTD if self._inputs is None else self._inputs.inserted(found_BTD)
