"""The vision towers of vision-language models, read from their configurations.

A tower is frozen and in 16 bits. No rank divides it: the torch trainer has it whole, and what an
engine may divide of it is counted as whole, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinkercloud_planning.architecture import Tower, UnknownArchitecture
from tinkercloud_planning.blocks import Config, Fields

_MAX_PIXELS = 1 << 24
"""Pixels of the largest image that the default limits accept (`ImageLimits.max_image_pixels`); the
processors of Qwen's models shrink images to that or less."""
_COLORS = 3
_BYTES = 2
"""Bytes of an activation."""
_WIDE_BYTES = 4
"""Bytes of a value that attention computes in float32."""
_GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Defaults of transformers, which published configurations leave out."""


def text_of(config: Config) -> Config:
    """Return the configuration of the language model of a vision-language model.

    Its `model_type` is that of the whole model, and its `vision_config` is kept. Qwen2.5-VL's
    published files have the fields of the language model at the top level.
    """
    whole = Fields(config)
    text = {**config, **whole.part("text_config"), "model_type": config["model_type"]}
    if config["model_type"] == "gemma3":
        text = _GEMMA3_TEXT | {name: value for name, value in text.items() if value is not None}
        text["hidden_act"] = text.get("hidden_activation", "gelu_pytorch_tanh")
    if config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in ("rope_scaling", "rope_parameters"):
        rope = Fields(text).part(name)
        # Rotary positions that have three axes for images are the default ones for text.
        if "mrope" in {rope.get("type"), rope.get("rope_type")}:
            text[name] = {**rope, "type": "default", "rope_type": "default"}
    return text


def tower(config: Config) -> Tower | None:
    """Return the vision tower that a `config.json` describes; None for models of text only.

    Raises:
        UnknownArchitecture: a field is missing or has a value that can't be.
    """
    read = _TOWERS.get(str(config.get("model_type")))
    if read is None:
        return None
    seen = Fields(config).part("vision_config")
    if not seen:
        raise UnknownArchitecture(
            "vision_config: missing in the model's config.json; a vision-language model has one"
        )
    return read(Fields(seen), Fields(text_of(config)).size("hidden_size"))


def model_types() -> list[str]:
    """Return the values of `model_type` of models with a tower."""
    return sorted(_TOWERS)


def _linear(inputs: int, outputs: int) -> int:
    """Return the parameters of a linear layer with a bias."""
    return inputs * outputs + outputs


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a tower of Qwen's families."""

    hidden: int
    inner: int
    depth: int
    heads: int
    patch: int
    merge: int
    outputs: int
    pixels: int
    """Values of a patch."""

    @classmethod
    def of(cls, fields: Fields) -> "_Sizes":
        patch = fields.size("patch_size")
        return cls(
            hidden=fields.size("hidden_size"),
            inner=fields.size("intermediate_size"),
            depth=fields.size("depth"),
            heads=fields.size("num_heads"),
            patch=patch,
            merge=fields.size("spatial_merge_size"),
            outputs=fields.size("out_hidden_size"),
            pixels=_COLORS * fields.size("temporal_patch_size") * patch**2,
        )

    @property
    def merged(self) -> int:
        """Width of the patches that become one token."""
        return self.hidden * self.merge**2

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return _linear(self.hidden, 3 * self.hidden) + _linear(self.hidden, self.hidden)

    @property
    def merger(self) -> int:
        """Parameters of what merges patches into tokens, without its norm."""
        return _linear(self.merged, self.merged) + _linear(self.merged, self.outputs)

    def image_bytes(self, *, inner_values: int, corners: int, features: int) -> int:
        """Return the peak of the largest image.

        Args:
            inner_values: values of the MLP's inner width that exist at the same time.
            corners: places of a learned grid that each patch is between; 0 without a grid.
            features: values for each token that the language model reads.
        """
        # The layer's input, the normalized one, and queries, keys and values.
        narrow = 5 * _BYTES * self.hidden
        # Rotary positions: queries and keys, rotated queries, and three steps of rotated keys.
        wide = 6 * _WIDE_BYTES * self.hidden
        # The inputs of the layer and its MLP, and the normalized one.
        in_mlp = _BYTES * (3 * self.hidden + inner_values * self.inner)
        # The embeddings of its places: stored, in float32, and weighted, in addition to its own.
        in_grid = (_BYTES + corners * (_BYTES + 2 * _WIDE_BYTES)) * self.hidden
        angles = 4 * _WIDE_BYTES * self.hidden // self.heads
        per_patch = _BYTES * (self.pixels + features // self.merge**2)
        per_patch += max(narrow + wide, in_mlp, in_grid) + angles
        return _patches(self.patch) * per_patch


def _patches(side: int) -> int:
    """Return the patches of the largest image."""
    return -(-_MAX_PIXELS // side**2)


def _qwen2_5(fields: Fields, _width: int) -> Tower:
    sizes = _Sizes.of(fields)
    hidden, inner = sizes.hidden, sizes.inner
    layer = 2 * hidden + sizes.attention + 2 * _linear(hidden, inner) + _linear(inner, hidden)
    embedding = sizes.pixels * hidden
    return Tower(
        parameters=embedding + sizes.depth * layer + hidden + sizes.merger,
        image_bytes=sizes.image_bytes(inner_values=3, corners=0, features=sizes.outputs),
        features=sizes.outputs,
    )


def _qwen3(fields: Fields, _width: int) -> Tower:
    sizes = _Sizes.of(fields)
    hidden, inner = sizes.hidden, sizes.inner
    deeper = fields.config.get("deepstack_visual_indexes")
    if not isinstance(deeper, list):
        raise UnknownArchitecture(
            f"vision_config.deepstack_visual_indexes: {deeper!r} in the model's config.json;"
            " expected a list of layers"
        )
    layer = 4 * hidden + sizes.attention + _linear(hidden, inner) + _linear(inner, hidden)
    places = fields.size("num_position_embeddings") * hidden
    mergers = 2 * hidden + sizes.merger + len(deeper) * (2 * sizes.merged + sizes.merger)
    features = (1 + len(deeper)) * sizes.outputs
    return Tower(
        parameters=_linear(sizes.pixels, hidden) + places + sizes.depth * layer + mergers,
        image_bytes=sizes.image_bytes(inner_values=2, corners=4, features=features),
        features=features,
    )


def _siglip(fields: Fields, width: int) -> Tower:
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    side = fields.size("patch_size")
    if fields.flag("vision_use_head", default=True):
        raise UnknownArchitecture(
            "vision_config.vision_use_head: true or missing; only false can be planned for"
        )
    patches = (fields.size("image_size") // side) ** 2
    layer = 4 * hidden + 4 * _linear(hidden, hidden)
    layer += _linear(hidden, inner) + _linear(inner, hidden)
    embedding = _linear(_COLORS * side**2, hidden) + patches * hidden
    # The last norm of the tower, and the projection with its norm.
    last = 2 * hidden + hidden * width + hidden
    # The inputs of the tower, the layer and its MLP, the normalized one, and the MLP's values.
    # Attention has fewer.
    layer_values = 4 * hidden + 2 * max(inner, hidden)
    return Tower(
        parameters=embedding + fields.size("num_hidden_layers") * layer + last,
        image_bytes=_BYTES * patches * (layer_values + _COLORS * side**2),
        features=width,
    )


_TOWERS: Mapping[str, Callable[[Fields, int], Tower]] = {
    "gemma3": _siglip,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
}
