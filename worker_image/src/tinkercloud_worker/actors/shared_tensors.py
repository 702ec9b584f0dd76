"""Passes tensors between processes of a Ray cluster through shared memory.

By default Ray pickles a tensor, including all storage behind a view, and each receiver gets its own
copy. As NumPy arrays, tensors are in the object store of a node once, and all receivers read them
there.

Received tensors must not be written to: torch has no read-only tensors, and all processes of the
node read the same memory. The memory stays allocated in the object store while any tensor of the
same message is referenced, so copy tensors that are kept.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from ray.util import register_serializer
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Sent: TypeAlias = tuple[NDArray[np.uint8], torch.dtype, torch.Size]
"""The contiguous bytes of a tensor, its dtype and its shape."""


def send_through_shared_memory() -> None:
    """Use shared memory for all tensors that this process sends or puts in Ray's store.

    They must be on the CPU and must not require gradients. Ray must be initialized; receivers do
    not need this call.
    """
    register_serializer(Tensor, serializer=_sent, deserializer=_received)


def _sent(tensor: Tensor) -> Sent:
    # As bytes, since numpy does not support bfloat16. `Tensor.numpy` would prevent the memory of a
    # model from being freed while it is idle (`training.paging`).
    flat = np.from_dlpack(tensor.contiguous().view(-1).view(torch.uint8))
    content: NDArray[np.uint8] = np.asarray(flat, np.uint8)
    return content, tensor.dtype, tensor.shape


def _received(sent: Sent) -> Tensor:
    content, dtype, shape = sent
    # Other conversions warn about read-only arrays.
    return from_dlpack(content).view(dtype).view(shape)
