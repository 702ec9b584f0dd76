"""The vision tower of a base model: frozen, and shared by all models and samplers.

The language model computes embeddings of images in place of their placeholder tokens. Each image is
computed by itself, so its features do not depend on other images of a pass, and are kept for the
next pass with the same image.

Shape legend: I tokens of images, D hidden size of the language model, R rows of a pass, L keys.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES
from tinkercloud_worker.vision.masks import ImageMasks
from tinkercloud_worker.vision.prepared import PreparedImage
from tinkercloud_worker.vision.spans import (
    Images,
    ImageSpan,
    end_of,
    rope_positions,
    rope_shift,
    rows_of,
)

_KEPT_BYTES = 256 << 20
"""Bytes of features that are kept for later passes."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """What the language model reads of images."""

    embeddings_ID: Tensor
    """The inputs of the first layer."""
    deeper_ID: tuple[Tensor, ...] = ()
    """What is added to the output of the first layers (Qwen3-VL)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        return sum(each.nbytes for each in (self.embeddings_ID, *self.deeper_ID))

    @classmethod
    def joined(cls, features: Sequence["ImageFeatures"]) -> "ImageFeatures":
        """Return the features of several images as those of one."""
        deeper = zip(*(each.deeper_ID for each in features), strict=True)
        return cls(
            torch.cat([each.embeddings_ID for each in features]),
            tuple(torch.cat(layer) for layer in deeper),
        )


class ImageInputs:
    """The images of one pass."""

    def __init__(self, rows_I: Tensor, features: ImageFeatures) -> None:
        """Place features.

        Args:
            rows_I: int64 rows of the pass, ascending.
            features: the features of these rows.
        """
        self._rows_I = rows_I
        self._features = features

    def inserted(self, embeddings_1RD: Tensor) -> Tensor:
        """Return the embeddings of a pass, with those of images in place of their placeholders."""
        own_1ID = self._features.embeddings_ID[None].to(embeddings_1RD.dtype)
        return embeddings_1RD.index_copy(1, self._rows_I, own_1ID)

    def arguments(self, num_rows: int) -> dict[str, Any]:
        """Return the arguments of a Hugging Face backbone that adds deeper features."""
        if not self._features.deeper_ID:
            return {}
        is_image_R = torch.zeros(num_rows, dtype=torch.bool, device=self._rows_I.device)
        is_image_R[self._rows_I] = True
        return {
            "visual_pos_masks": is_image_R[None],
            "deepstack_visual_embeds": list(self._features.deeper_ID),
        }


class VisionTower:
    """Computes what the language model reads of images. Used by one thread at a time."""

    def __init__(self, modules: nn.Module, config: Any) -> None:  # noqa: ANN401 - transformers' configurations have no common type
        """Create a tower.

        Args:
            modules: transformers' model without its language model.
            config: the configuration of the whole model.
        """
        self._tower: Any = modules.eval().requires_grad_(requires_grad=False)
        self._window: int | None = getattr(config.get_text_config(), "sliding_window", None)
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        self._merge: int | None = merge if config.model_type.startswith("qwen") else None
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._kept_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(weight.nbytes for weight in self._tower.parameters())

    def rope_shift(self, images: Images) -> int:
        """Return the rotary position of tokens after a prompt, less their index."""
        return 0 if self._merge is None else rope_shift(images, self._merge)

    def inputs(self, spans: Sequence[ImageSpan]) -> ImageInputs | None:
        """Return the images of a pass; None if it has none."""
        placed = list(rows_of(spans))
        if not placed:
            return None
        rows_I = torch.cat([torch.arange(row, row + image.count) for row, image in placed])
        features = [self._features(image) for _, image in placed]
        return ImageInputs(rows_I.to(self._device), ImageFeatures.joined(features))

    def arguments(self, spans: Sequence[ImageSpan], mask_kinds: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a Hugging Face backbone that depend on where images are.

        Args:
            spans: the sequences of the pass.
            mask_kinds: the mask kinds of the model; see `packed_attention.mask_kinds`.
        """
        if self._merge is None:
            masks = ImageMasks(spans, self._device)
            return {"image_masks": masks} if len(spans) > 1 else self._mask(masks, mask_kinds)
        parts = []
        for span in spans:
            before = tuple(each for each in span.images if end_of(each) <= span.stop)
            positions_3N = rope_positions(span.stop, before, self._merge)
            parts.append(torch.from_numpy(positions_3N[:, span.start :]))
        return {"position_ids": torch.cat(parts, 1).to(self._device)[:, None]}

    def _mask(self, masks: ImageMasks, mask_kinds: Sequence[str]) -> dict[str, Any]:
        """Return the mask of a single sequence, for each kind of layer."""
        windows = {
            kind: self._window if kind == "sliding_attention" else None for kind in mask_kinds
        }
        return {"attention_mask": {kind: masks.of(0, windows[kind]) for kind in mask_kinds}}

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._tower.parameters()).device
        return device

    def _features(self, image: PreparedImage) -> ImageFeatures:
        features = self._kept.pop(image.fingerprint, None)
        if features is None:
            features = self._computed(image)
            self._kept_bytes += features.num_bytes
        self._kept[image.fingerprint] = features
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes
        return features

    @torch.no_grad()
    def _computed(self, image: PreparedImage) -> ImageFeatures:
        # Ranks read pixels in Ray's store; other conversions warn about read-only arrays.
        pixels = from_dlpack(image.pixels).to(self._device, self._tower.dtype)
        grid = {}
        if image.grid is not None:
            grid["image_grid_thw"] = torch.tensor([image.grid], device=self._device)
        found = self._tower.get_image_features(pixel_values=pixels, return_dict=True, **grid)
        embeddings_ID = found.pooler_output[0]
        if len(embeddings_ID) != image.count:
            raise ValueError(
                f"the vision tower makes {len(embeddings_ID)} embeddings of an image with"
                f" {image.count} placeholder tokens"
            )
        deeper = getattr(found, "deepstack_features", None) or ()
        return ImageFeatures(embeddings_ID, tuple(layer[0] for layer in deeper))

    def forget(self) -> None:
        """Free the features kept for later passes."""
        self._kept.clear()
        self._kept_bytes = 0


def split_tower(model: Any, decoder: nn.Module) -> VisionTower | None:  # noqa: ANN401 - transformers' own is not typed
    """Return the vision tower of a complete model, sharing its weights.

    Args:
        model: a vision-language model of transformers.
        decoder: its language model.

    Returns:
        None for families whose images are not read, and models without their tower.
    """
    inner = model.base_model
    if model.config.model_type not in IMAGE_MODEL_TYPES or inner in {model, decoder}:
        return None
    towers = {
        name: child
        for name, child in inner.named_children()
        if child is not None and decoder not in set(child.modules())
    }
    if not towers:
        return None
    # The same object with other children: its methods compute features from these alone.
    modules = copy(inner)
    modules._modules = towers
    return VisionTower(modules, model.config)
