"""Sequences packed one after another in one row, and the attention that keeps them apart.

No position is padding: everything but attention is computed position by position anyway. Half
precision on an accelerator takes flash attention's kernel for sequences of many lengths; elsewhere
each sequence is attended to by itself, as transformers would.

Shape legend: R positions of all sequences, S sequences, H query heads, G key-value heads, E head
size.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tinkercloud_worker.device import accelerator

ATTENTION = "packed_sdpa"
"""The name that transformers knows `_attend` by."""
_OWN_ATTENTION = "sdpa"
"""The name of transformers' own that `_attend` takes the place of."""

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
"""Elements of a head, for which flash attention has kernels."""
_TAKES_FEWER_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""Before torch 2.12 it did so without being told."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Token ids of sequences, one after another."""

    ids_R: Tensor
    """int64."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @classmethod
    def joined(cls, packs: Sequence["PackedSequences"]) -> "PackedSequences":
        """Return the sequences of several packs as one."""
        if len(packs) == 1:
            return packs[0]
        lengths = tuple(length for pack in packs for length in pack.lengths)
        return cls(torch.cat([pack.ids_R for pack in packs]), lengths)

    def arguments(self, mask_kinds: Sequence[str]) -> dict[str, Any]:
        """Return what a Hugging Face trunk takes for these sequences.

        Args:
            mask_kinds: of the model, see `mask_kinds`.
        """
        device = self.ids_R.device
        positions_R = torch.cat([torch.arange(length) for length in self.lengths]).to(device)
        arguments = {
            "input_ids": self.ids_R[None],
            "position_ids": positions_R[None],
            "use_cache": False,
        }
        if len(self.lengths) == 1:
            return arguments
        starts = list(accumulate(self.lengths, initial=0))
        starts_S = torch.tensor(starts, dtype=torch.int32, device=device)
        # A mask that is finished already, so that none is made: attention knows the sequences.
        mask: Any = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        if len(mask_kinds) > 1:
            mask = dict.fromkeys(mask_kinds, mask)
        return arguments | {
            "attention_mask": mask,
            "cu_seq_lens_q": starts_S,
            "cu_seq_lens_k": starts_S,
            "max_length_q": max(self.lengths),
            "max_length_k": max(self.lengths),
        }


def mask_kinds(config: Any) -> list[str]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the kinds of layers for which a model wants masks of their own."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()))
    has_window = getattr(text, "sliding_window", None)
    return kinds or ["sliding_attention" if has_window else "full_attention"]


@dataclass(slots=True, eq=False)
class Windows:
    """Whether layers tell attention of the masks that the model makes for them.

    For a pack no mask is made. All that attention knows of a layer's then is the `sliding_window`
    that the layer gives with its call. Some families have windows, or chunks, in masks only.
    """

    are_told: bool = True
    """Of all layers so far: the mask is causal within the window that came with it, and no more."""
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def made(self, mask: Tensor, window: int | None) -> None:
        """Note a mask that is causal within a window; None: that is causal."""
        self._masks.append((mask, window))

    def attended(self, mask: Tensor | None, window: int | None) -> None:
        """Note what a layer gave attention. No mask is a causal one; one not noted, another."""
        own = [None] if mask is None else [size for made, size in self._masks if made is mask]
        self.are_told &= own == [window or None]


_windows: ContextVar[Windows | None] = ContextVar("windows", default=None)


@contextmanager
def watched_windows() -> Iterator[Windows]:
    """Watch passes of one sequence. Masks are made in them that would be left out otherwise."""
    windows = Windows()
    token = _windows.set(windows)
    try:
        yield windows
    finally:
        _windows.reset(token)


def _mask(
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,  # noqa: ANN401 - transformers', passed on
) -> Tensor | None:
    """Return the mask of some layers. The signature is transformers'.

    Args:
        local_size: of their window, or of their chunks; None if they have neither.
        allow_is_causal_skip: whether it is causal within that, so that it may not be needed.
        kwargs: all else.
    """
    windows = _windows.get()
    skip = allow_is_causal_skip and windows is None
    mask = sdpa_mask(local_size=local_size, allow_is_causal_skip=skip, **kwargs)
    if windows is not None and mask is not None and allow_is_causal_skip:
        windows.made(mask, local_size)
    return mask


def _attend(
    module: torch.nn.Module,
    query_1HRE: Tensor,
    key_1GRE: Tensor,
    value_1GRE: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,  # noqa: ANN401 - the model's, passed on
) -> tuple[Tensor, None]:
    """Return [1, R, H, E]: scaled dot-product attention, within each sequence if there are many.

    The signature is transformers', as are the names of what tells sequences apart.
    """
    window = kwargs.get("sliding_window")
    if cu_seq_lens_q is None:
        if (windows := _windows.get()) is not None:
            windows.attended(attention_mask, window)
        output, _ = sdpa_attention_forward(
            module, query_1HRE, key_1GRE, value_1GRE, attention_mask, **kwargs
        )
        return output, None
    if flash_takes(query_1HRE, value_1GRE):
        output_RHE = flash_attention(
            query_1HRE[0].transpose(0, 1),
            key_1GRE[0].transpose(0, 1),
            value_1GRE[0].transpose(0, 1),
            cu_seq_lens_q,
            max_length_q,
            scale=kwargs.get("scaling"),
            window=window,
        )
        return output_RHE[None], None
    parts = []
    for start, stop in pairwise(cu_seq_lens_q.tolist()):
        own = slice(start, stop)
        part, _ = sdpa_attention_forward(
            module,
            query_1HRE[:, :, own],
            key_1GRE[:, :, own],
            value_1GRE[:, :, own],
            _recent(stop - start, window, query_1HRE.device),
            **kwargs,
        )
        parts.append(part)
    return torch.cat(parts, 1), None


def flash_takes(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention has a kernel for heads of these types and widths [..., E]."""
    size = query.shape[-1]
    return (
        accelerator.has_flash_attention(query)
        and query.dtype in _HALF
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _LARGEST_HEAD
    )


def flash_attention(
    query_RHE: Tensor,
    key_RGE: Tensor,
    value_RGE: Tensor,
    starts: Tensor,
    longest: int,
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Return [R, H, E]: causal attention within each sequence, by one kernel for all.

    Args:
        query_RHE: of a type and width for which `flash_takes` says so.
        key_RGE: as the queries, of fewer heads or as many.
        value_RGE: as the keys.
        starts: int32 [S + 1], where each sequence begins and the last ends.
        longest: tokens of the longest sequence.
        scale: of the products; None for one over the square root of the width.
        window: positions that each sees, itself included; None for all before it.
    """
    # One tensor, as no auxiliary ones are asked for.
    output_RHE: Any = varlen_attn(
        query_RHE,
        key_RGE,
        value_RGE,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        **_TAKES_FEWER_KEY_HEADS,
    )
    return cast("Tensor", output_RHE)


def _recent(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which positions [1, 1, length, length] a window lets see which; None: all earlier."""
    if not window or length <= window:
        return None
    all_NN = torch.ones(length, length, dtype=torch.bool, device=device)
    return all_NN.tril().triu(1 - window)[None, None]


def use_packed_attention(model: Any) -> bool:  # noqa: ANN401 - transformers' own is not typed
    """Make a model attend through this module, if it takes packed sequences; return whether.

    Some compute wrongly then: see `use_own_attention`.
    """
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(
        model.base_model.forward
    ).parameters
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if model.config._attn_implementation != _OWN_ATTENTION or not takes_more:
        return False
    model.set_attn_implementation(ATTENTION)
    return True


def use_own_attention(model: Any) -> None:  # noqa: ANN401 - transformers' own is not typed
    """Make a model attend as it did before `use_packed_attention`.

    Sparse attention, for one, gives a choice of positions to others than transformers' own.
    """
    model.set_attn_implementation(_OWN_ATTENTION)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
