"""Causal attention over sequences that may be divided over ranks.

Queries stay where they are; keys and values, of which grouped queries need few, are gathered. So no
rank waits for another in the midst of it, and the kernels are torch's own on every device.

Shape legend: T positions of the whole, S of them held here, L of a chunk; B examples, H heads and G
groups of them at this rank, D a head's width, E that of its values.
"""

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from tinkercloud_worker.megatron_trainer.sequence import SequenceDivision


class CausalAttention(nn.Module):
    """The core attention of a megatron-core layer: no mask, dropout, bias or packed sequences.

    Rows are padded on the right, where what is computed is of no use: causality is all the mask.
    """

    def __init__(  # noqa: PLR0917 - megatron-core builds it
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002 - as above
        attn_mask_type: AttnMaskType,
        attention_type: str,  # noqa: ARG002 - as above
        attention_dropout: float | None = None,  # noqa: ARG002 - as above
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # noqa: ARG002 - as above
        v_channels: int | None = None,  # noqa: ARG002 - as above
        cp_comm_type: str | None = None,  # noqa: ARG002 - as above
        pg_collection: ProcessGroupCollection | None = None,  # noqa: ARG002 - as above
    ) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal, attn_mask_type  # noqa: S101 - layers' own
        assert config.window_size is None, config.window_size  # noqa: S101 - `model` refuses it
        self._scale = softmax_scale
        self._division = SequenceDivision(parallel_state.get_context_parallel_group())

    def forward(  # noqa: PLR0917 - megatron-core calls it
        self,
        query_SBHD: Tensor,
        key_SBGD: Tensor,
        value_SBGE: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002 - as in `__init__`
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [S, B, H x E]: what the positions held here attend to."""
        given = (attention_mask, attention_bias, packed_seq_params)
        assert given == (None, None, None), given  # noqa: S101 - the trainer gives none
        both = self._division.whole(torch.cat([key_SBGD, value_SBGE], -1)).permute(1, 2, 0, 3)
        keys_BGTD, values_BGTE = both.split([key_SBGD.shape[-1], value_SBGE.shape[-1]], -1)
        chunks = query_SBHD.permute(1, 2, 0, 3).chunk(len(self._division.chunks), 2)
        results = []
        for number, query_BHLD in zip(self._division.chunks, chunks, strict=True):
            seen = (number + 1) * query_BHLD.shape[2]
            results.append(
                nn.functional.scaled_dot_product_attention(
                    query_BHLD,
                    keys_BGTD[:, :, :seen],
                    values_BGTE[:, :, :seen],
                    attn_mask=_causal(query_BHLD, seen),
                    scale=self._scale,
                    enable_gqa=True,
                )
            )
        return torch.cat(results, 2).permute(2, 0, 1, 3).flatten(2)


def _causal(query_BHLD: Tensor, seen: int) -> Tensor:
    """Return the mask of the last so many positions of those that are seen.

    Kernels need no such tensor, which long sequences have no room for: on GPUs none, on the CPU
    those for the first positions.
    """
    length = query_BHLD.shape[2]
    if query_BHLD.is_cuda or length == seen:
        return causal_lower_right(length, seen)
    ones = torch.ones(length, seen, dtype=torch.bool, device=query_BHLD.device)
    return ones.tril(seen - length)
