"""Products of half-precision matrices whose results are float32.

An accelerator adds them up in float32 anyway; rounding them before they are used costs accuracy and
a pass over the result.
"""

import torch
from torch import Tensor


def float32_product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Return the product [M, N], float32; the factors are of one type."""
    if left_MK.is_cuda and left_MK.dtype != torch.float32:
        return torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    return (left_MK @ right_KN).float()
