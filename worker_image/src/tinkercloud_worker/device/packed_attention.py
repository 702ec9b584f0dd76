"""Sequences packed one after another in one row, and the attention that separates them.

There is no padding: everything except attention is computed position by position anyway. On an
accelerator, half precision uses variable-length flash attention; otherwise attention runs on each
sequence separately, as in transformers.

Shape legend: R positions of all sequences, S sequences, H query heads, G key-value heads, E head
size.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.vision.masks import ImageMasks
from tinkercloud_worker.vision.spans import Images, ImageSpan

ATTENTION = "packed_sdpa"
"""The name under which `_attend` is registered with transformers."""
_OWN_ATTENTION = "sdpa"
"""The name of the attention in transformers that `_attend` replaces."""

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
"""Largest head size for which flash attention has kernels."""
_TAKES_FEWER_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""Before torch 2.12 this was the default."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Token ids of sequences, one after another."""

    ids_R: Tensor
    """int64."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    images: tuple[Images, ...] = ()
    """The images of each sequence; empty if none has any."""

    @property
    def spans(self) -> list[ImageSpan]:
        """Where its images are."""
        return [
            ImageSpan(0, *each) for each in zip(self.lengths, self.images, strict=bool(self.images))
        ]

    @classmethod
    def joined(cls, packs: Sequence["PackedSequences"]) -> "PackedSequences":
        """Return the sequences of several packs as one."""
        if len(packs) == 1:
            return packs[0]
        lengths = tuple(length for pack in packs for length in pack.lengths)
        images: tuple[Images, ...] = ()
        if any(pack.images for pack in packs):
            images = tuple(
                each for pack in packs for each in pack.images or [()] * len(pack.lengths)
            )
        return cls(torch.cat([pack.ids_R for pack in packs]), lengths, images)

    def arguments(self, mask_kinds: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a Hugging Face backbone for these sequences.

        Args:
            mask_kinds: the mask kinds of the model; see `mask_kinds`.
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
        # A prepared mask, so that none is built: attention separates the sequences itself.
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
    """Return the kinds of layers that need separate masks."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()))
    has_window = getattr(text, "sliding_window", None)
    return kinds or ["sliding_attention" if has_window else "full_attention"]


@dataclass(slots=True, eq=False)
class Windows:
    """Records whether layers pass the window of their mask to attention.

    No mask is built for a pack, so attention only knows the `sliding_window` that a layer passes
    with its call. Some families express windows or chunks only in masks.
    """

    are_passed: bool = True
    """Whether, for all layers so far, the mask was causal within the window passed with it."""
    _masks: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def made(self, mask: Tensor, window: int | None) -> None:
        """Record a mask that is causal within a window; None: plain causal."""
        self._masks.append((mask, window))

    def attended(self, mask: Tensor | None, window: int | None) -> None:
        """Record an attention call. No mask means causal; an unknown mask is of another kind."""
        own = [None] if mask is None else [size for made, size in self._masks if made is mask]
        self.are_passed &= own == [window or None]


_windows: ContextVar[Windows | None] = ContextVar("windows", default=None)


@contextmanager
def watched_windows() -> Iterator[Windows]:
    """Watch passes of one sequence, and build masks that would otherwise be skipped."""
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
    """Return the mask of some layers. transformers defines the signature.

    Args:
        local_size: the size of their window or chunks; None if they have neither.
        allow_is_causal_skip: whether the mask is causal within that size, and may be skipped.
        kwargs: other arguments, passed on.
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
    image_masks: ImageMasks | None = None,
    **kwargs: Any,  # noqa: ANN401 - the model's, passed on
) -> tuple[Tensor, None]:
    """Return [1, R, H, E]: scaled dot-product attention, within each sequence if there are many.

    transformers defines the signature and the names of the arguments that separate sequences.
    """
    window = kwargs.get("sliding_window")
    if cu_seq_lens_q is None:
        if (windows := _windows.get()) is not None:
            windows.attended(attention_mask, window)
        output, _ = sdpa_attention_forward(
            module, query_1HRE, key_1GRE, value_1GRE, attention_mask, **kwargs
        )
        return output, None
    if image_masks is None and flash_takes(query_1HRE, value_1GRE):
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
    start = 0
    own_masks = [
        None if image_masks is None else image_masks.of(number, window)
        for number in range(len(cu_seq_lens_q) - 1)
    ]
    lengths = [stop - start for start, stop in pairwise(cu_seq_lens_q.tolist())]
    for (length, _), equal in groupby(
        zip(lengths, own_masks, strict=True), lambda each: (each[0], id(each[1]))
    ):
        # Neighbours of one length are a batch: the same bits with fewer calls.
        members = list(equal)
        count, own_mask = len(members), members[0][1]
        own = slice(start, start + count * length)
        part_BNHE, _ = sdpa_attention_forward(
            module,
            _batch(query_1HRE[0, :, own], count),
            _batch(key_1GRE[0, :, own], count),
            _batch(value_1GRE[0, :, own], count),
            _recent(length, window, query_1HRE.device) if own_mask is None else own_mask,
            **kwargs,
        )
        parts.append(part_BNHE.flatten(0, 1))
        start = own.stop
    return torch.cat(parts)[None], None


def _batch(heads_HRE: Tensor, count: int) -> Tensor:
    """Return the heads [B, H, N, E] of so many sequences of one length, without a copy."""
    heads, rows, size = heads_HRE.shape
    return heads_HRE.view(heads, count, rows // count, size).transpose(0, 1)


def flash_takes(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention has a kernel for heads of these dtypes and sizes [..., E]."""
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
    """Return [R, H, E]: causal attention within each sequence, in one kernel for all.

    Args:
        query_RHE: the queries, of a dtype and size that `flash_takes` accepts.
        key_RGE: the keys, with at most as many heads.
        value_RGE: the values, with as many heads as the keys.
        starts: int32 [S + 1], the start of each sequence and the end of the last.
        longest: tokens of the longest sequence.
        scale: scale of the scores; None for one over the square root of the head size.
        window: number of positions visible to each, including itself; None for all before it.
    """
    # A single tensor is returned, because no auxiliary ones are requested.
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
    """Return the mask [1, 1, length, length] of a window; None: all earlier positions."""
    if not window or length <= window:
        return None
    all_NN = torch.ones(length, length, dtype=torch.bool, device=device)
    return all_NN.tril().triu(1 - window)[None, None]


def use_packed_attention(model: Any) -> bool:  # noqa: ANN401 - transformers' own is not typed
    """Route a model's attention through this module if it accepts packs; return whether it does.

    Some models then compute incorrectly; see `use_own_attention`.
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
    """Restore the model's attention from before `use_packed_attention`.

    Sparse attention, for example, passes a selection of positions to other implementations.
    """
    model.set_attn_implementation(_OWN_ATTENTION)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
