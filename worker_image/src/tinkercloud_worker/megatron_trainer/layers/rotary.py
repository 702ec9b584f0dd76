"""Rotary positions with Hugging Face's frequencies.

megatron-core implements its own scalings, with constants of one Llama release; here transformers
computes the frequencies of a configuration for every kind of scaling.
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
"""Scaling types whose frequencies do not depend on the sequence length."""


class RotaryTable(RotaryEmbedding):  # type: ignore[misc] # megatron-core has no types
    """A table of rotary angles, as long as the longest sequence so far.

    megatron-core keeps a table for each of the last 32 lengths, half a gigabyte at 32k tokens.
    Packed sequences all start at position 0, so the table of the longest one serves all.
    """

    def __init__(self, frequencies: Tensor) -> None:
        """Create a table from frequencies in radians per position, float32 [head_dim / 2]."""
        super().__init__(2 * len(frequencies), rotary_percent=1.0)
        self.inv_freq = frequencies
        self._table: Tensor | None = None

    def forward(self, max_seq_len: int, **_: object) -> Tensor:
        """Return the angles of a sequence's positions over all context-parallel ranks.

        Args:
            max_seq_len: positions of the longest sequence over all ranks.
            _: other arguments of megatron-core, unused.

        Returns:
            Radians, float32 [max_seq_len, 1, 1, head_dim].
        """
        if self._table is None or len(self._table) < max_seq_len:
            self._table = self.get_emb(max_seq_len)
        return self._table[:max_seq_len]


def check(config: Any) -> None:  # noqa: ANN401 - transformers' own
    """Check that the rotary positions of a configuration are supported.

    Raises:
        UnsupportedModelError: frequencies depend on the sequence length, or only part of each head
            is rotated.
    """
    kind = config.rope_parameters["rope_type"]
    if kind not in _SCALED | {"default"}:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported by the megatron trainer, which supports"
            f" {', '.join(sorted(_SCALED))} and default; use backend torch"
        )
    rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {rotated} is not supported by the megatron trainer, which"
            f" rotates full heads; use backend torch"
        )


def settings(config: Any) -> Mapping[str, object]:  # noqa: ANN401 - transformers' own
    """Return the TransformerConfig settings for the scaling of positions.

    transformers multiplies the cosines and sines of queries and keys by a factor, which is
    equivalent to multiplying attention scores by its square.
    """
    _, factor = frequencies(config)
    return {} if factor == 1.0 else {"softmax_scale": factor**2 / config.head_dim**0.5}


def set_frequencies(module: GPTModel, config: Any) -> None:  # noqa: ANN401 - transformers' own
    """Set the frequencies of a module from a configuration."""
    module.rotary_pos_emb = RotaryTable(frequencies(config)[0])


def frequencies(config: Any) -> tuple[Tensor, float]:  # noqa: ANN401 - transformers' own
    """Return radians per position, float32 [head_dim / 2], and the factor of rotated values.

    Args:
        config: the Hugging Face configuration, whose head_dim is the number of rotated elements.
    """
    rope, size = config.rope_parameters, config.head_dim
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    scaled, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return scaled, factor
