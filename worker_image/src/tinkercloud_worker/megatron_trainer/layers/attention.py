"""Causal attention within packed sequences, with context parallelism.

Queries stay on their rank; keys and values, which grouped-query attention keeps small, are
gathered. No rank therefore waits for another in the middle of attention, and every device uses
torch's own kernels.

Shape legend: P positions of all sequences, S of them on this rank, L of a chunk; H heads and G
key-value heads on this rank, D head size, E head size of values.
"""

from itertools import accumulate, pairwise

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.device.packed_attention import flash_attention, flash_takes
from tinkercloud_worker.megatron_trainer.layers.sequence import DividedSequences, SequenceDivision


class CausalAttention(nn.Module):
    """The core attention of a megatron-core layer for packed sequences, without dropout or bias."""

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
        query_SHD: Tensor,
        key_SGD: Tensor,
        value_SGE: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002 - as in `__init__`
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return the attention [S, H, E] of the positions on this rank."""
        given = (attention_mask, attention_bias)
        assert given == (None, None), given  # noqa: S101 - the trainer gives none
        sequences = packed_seq_params
        assert isinstance(sequences, DividedSequences), sequences  # noqa: S101 - as above
        if sequences.order_P is None and flash_takes(query_SHD, value_SGE):
            longest = sequences.max_seqlen_q
            return flash_attention(
                query_SHD, key_SGD, value_SGE, sequences.starts_N1, longest, scale=self._scale
            )
        both = self._division.whole(torch.cat([key_SGD, value_SGE], -1), sequences)
        widths = [key_SGD.shape[-1], value_SGE.shape[-1]]
        keys_GPD, values_GPE = both.transpose(0, 1).split(widths, -1)
        query_HSD, results, held = query_SHD.transpose(0, 1), [], 0
        for start, stop in pairwise(accumulate(sequences.lengths, initial=0)):
            size = (stop - start) // self._division.multiple
            for number in self._division.chunks:
                seen = (number + 1) * size
                query_HLD = query_HSD[:, held : held + size]
                held += size
                results.append(
                    nn.functional.scaled_dot_product_attention(
                        query_HLD[None],
                        keys_GPD[None, :, start : start + seen],
                        values_GPE[None, :, start : start + seen],
                        attn_mask=_causal(query_HLD, seen),
                        scale=self._scale,
                        enable_gqa=True,
                    )[0]
                )
        return torch.cat(results, 1).transpose(0, 1)


def _causal(query_HLD: Tensor, seen: int) -> Tensor:
    """Return the causal mask of the last queries among all visible positions.

    For long sequences the mask would not fit into memory. GPU kernels need no mask tensor; CPU
    kernels need none if queries and keys have the same length.
    """
    length = query_HLD.shape[1]
    if accelerator.aligns_causal_masks(query_HLD) or length == seen:
        return causal_lower_right(length, seen)
    ones = torch.ones(length, seen, dtype=torch.bool, device=query_HLD.device)
    return ones.tril(seen - length)
