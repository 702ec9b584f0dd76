"""Attention masks of a decoding step: the model's own masks, for rows at different positions.

transformers builds masks for rows of one length. Visibility, by window or by chunk, is a function
of two positions that the model chooses for each kind of layer. Here this function is called with
each row's own position, for every kind.

Shape legend: B running sequences, L positions read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tinkercloud_worker.device.packed_attention import ATTENTION

_BOOLEAN = (ATTENTION, "sdpa")
"""Attention implementations that take boolean masks; others add masks to scores."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A pass over one new position of every row."""

    positions_B: Tensor
    """Position of each row's new token."""
    added_in: torch.dtype | None
    """Dtype of masks that are added to scores; None: the form that the model's attention
    expects."""


_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)


@contextmanager
def rows_at(positions_B: Tensor, added_in: torch.dtype | None = None) -> Iterator[None]:
    """Build a model's masks for rows at these positions within this context.

    Args:
        positions_B: the new position of each row.
        added_in: dtype of masks that are added to scores, which saves a conversion of boolean masks
            in every layer; None: boolean masks, where the model's attention supports them.
    """
    token = _rows.set(_Rows(positions_B, added_in))
    try:
        yield
    finally:
        _rows.reset(token)


def _mask(
    plain: Callable[..., Tensor | None],
    kind_added_in: Callable[[torch.dtype], torch.dtype | None],
    *,
    mask_function: Callable[..., Tensor],
    kv_length: int,
    kv_offset: int = 0,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,  # noqa: ANN401 - transformers', passed on
) -> Tensor | None:
    """Return the mask [B, 1, 1, L] of some layers. transformers defines the signature."""
    rows = _rows.get()
    if rows is None:
        return plain(
            mask_function=mask_function,
            kv_length=kv_length,
            kv_offset=kv_offset,
            dtype=dtype,
            **kwargs,
        )
    query_B111 = rows.positions_B[:, None, None, None]
    row_B111 = torch.arange(len(query_B111), device=query_B111.device)[:, None, None, None]
    key_111L = kv_offset + torch.arange(kv_length, device=query_B111.device)[None, None, None]
    seen = mask_function(row_B111, torch.zeros_like(row_B111[:1]), query_B111, key_111L)
    seen_B11L = seen.expand(len(query_B111), 1, 1, kv_length)
    added_in = rows.added_in or kind_added_in(dtype)
    if added_in is None:
        return seen_B11L
    return torch.zeros_like(seen_B11L, dtype=added_in).masked_fill_(~seen_B11L, -torch.inf)


def _take_over(name: str) -> None:
    def kind_added_in(dtype: torch.dtype) -> torch.dtype | None:
        return None if name in _BOOLEAN else dtype

    plain = ALL_MASK_ATTENTION_FUNCTIONS[name]
    AttentionMaskInterface.register(name, partial(_mask, plain, kind_added_in))


for _name in (*_BOOLEAN, "eager"):
    _take_over(_name)
