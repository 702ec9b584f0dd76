"""Rotary positions with the frequencies that Hugging Face gives them.

megatron-core has scalings of its own, with numbers of one release of Llama in them; those of a
configuration are transformers' to compute, whatever the scaling is called.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tinkercloud_worker.model.architecture import UnsupportedModelError

_SCALED = frozenset({"linear", "llama3", "yarn"})
"""Types whose frequencies are the same for sequences of every length."""


class RotaryTable(RotaryEmbedding):  # type: ignore[misc] # megatron-core has no types
    """Angles of positions, in one table as long as the longest sequence so far.

    megatron-core's own keeps a table for each of the last 32 lengths, half a gigabyte of them at
    32k tokens. Packed sequences all begin at position 0, so the longest one's table has all rows.
    """

    def __init__(self, frequencies: Tensor) -> None:
        """Make angles of frequencies, radians per position, float32 [head_dim / 2]."""
        super().__init__(2 * len(frequencies), rotary_percent=1.0)
        self.inv_freq = frequencies
        self._table: Tensor | None = None

    def forward(self, max_seq_len: int, **_: object) -> Tensor:
        """Return the angles of a sequence's positions at all ranks that divide it.

        Args:
            max_seq_len: positions of the longest sequence, at all ranks together.
            _: what else megatron-core says of sequences, the same of all that are packed.

        Returns:
            Radians, float32 [max_seq_len, 1, 1, head_dim].
        """
        if self._table is None or len(self._table) < max_seq_len:
            self._table = self.get_emb(max_seq_len)
        return self._table[:max_seq_len]


def check(config: Any) -> None:  # noqa: ANN401 - transformers' own
    """Check that positions can be computed as a configuration says.

    Raises:
        UnsupportedModelError: frequencies depend on the length of a sequence, or not all of a
            head's features are rotated.
    """
    kind = config.rope_parameters["rope_type"]
    if kind not in _SCALED | {"default"}:
        raise UnsupportedModelError(
            f"rope_type: the megatron trainer does not compute rotary positions of type {kind!r},"
            f" only of {', '.join(sorted(_SCALED))} and default; use backend torch"
        )
    rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor: the megatron trainer rotates whole heads, but this model"
            f" {rotated} of each; use backend torch"
        )


def settings(config: Any) -> Mapping[str, object]:  # noqa: ANN401 - transformers' own
    """Return what a TransformerConfig says about the scaling of positions.

    transformers multiplies the cosines and sines of queries and keys by a factor, which is to
    multiply what the softmax gets of both by its square.
    """
    _, factor = frequencies(config)
    return {} if factor == 1.0 else {"softmax_scale": factor**2 / config.head_dim**0.5}


def set_frequencies(module: GPTModel, config: Any) -> None:  # noqa: ANN401 - transformers' own
    """Give a module the frequencies of a configuration."""
    module.rotary_pos_emb = RotaryTable(frequencies(config)[0])


def frequencies(config: Any) -> tuple[Tensor, float]:  # noqa: ANN401 - transformers' own
    """Return radians per position, float32 [head_dim / 2], and what to multiply rotated values by.

    Args:
        config: of Hugging Face; its head_dim is the number of features that are rotated.
    """
    rope, size = config.rope_parameters, config.head_dim
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    scaled, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return scaled, factor
