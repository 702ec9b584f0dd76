"""How tensors go from one process of a Ray cluster to others: through memory that they share.

Ray would pickle a tensor, and with a view all that it is a view of, into memory of each process
that gets it. As arrays, tensors lie in the object store of a node once, and whoever receives them
reads them there.

What is received must not be written to: torch has no tensors that are read-only, and every process
of the node reads the same memory. It takes room in the store for as long as any tensor that came
with it is held. So copy what is to be kept.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from ray.util import register_serializer
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Sent: TypeAlias = tuple[NDArray[np.uint8], torch.dtype, torch.Size]
"""A tensor's bytes, in the order of its elements; dtype and shape."""


def send_through_shared_memory() -> None:
    """Have tensors that this process sends or puts into Ray's store go so from now on.

    They must be on the CPU and require no gradient: torch refuses others. Ray must be
    initialised; receivers need no such call.
    """
    register_serializer(Tensor, serializer=_sent, deserializer=_received)


def _sent(tensor: Tensor) -> Sent:
    # Bytes, since numpy knows no bfloat16.
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return content, tensor.dtype, tensor.shape


def _received(sent: Sent) -> Tensor:
    content, dtype, shape = sent
    # Other conversions warn of every read-only array.
    return from_dlpack(content).view(dtype).view(shape)
