"""Products of half-precision matrices whose results are float32.

Accelerators accumulate in float32 anyway; rounding the result first would cost accuracy and an
extra pass over it. torch has no such product on a CPU, where each result is rounded once.
"""

import torch
from torch import Tensor

from tinkercloud_worker.device import accelerator

_PART_BYTES = 256 << 20
"""Bytes of a product held at a time before it is added."""


def matmul_float32(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Return the product [M, N] in float32; both factors have the same dtype."""
    if accelerator.has_float32_mm(left_MK):
        return torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    return (left_MK @ right_KN).float()


def bmm_float32(left_GMK: Tensor, right_GKN: Tensor) -> Tensor:
    """Return the products [G, M, N] in float32; both factors have the same dtype."""
    if accelerator.has_float32_mm(left_GMK):
        return torch.bmm(left_GMK, right_GKN, out_dtype=torch.float32)
    return torch.bmm(left_GMK, right_GKN).float()


def addmm_float32_(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """Add the product to a float32 matrix; both factors have the same dtype."""
    if left_MK.dtype == torch.float32:
        total_MN.addmm_(left_MK, right_KN)
        return
    rows = max(1, _PART_BYTES // (4 * total_MN.shape[1]))
    for start in range(0, len(total_MN), rows):
        part = slice(start, start + rows)
        total_MN[part].add_(matmul_float32(left_MK[part], right_KN))
