"""Recording of decoding steps without a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tinkercloud_worker.torch_sampler.decode.captured_steps import Compute


class Operations:
    """Records work as operations on the same tensors."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        """See `GraphCapturer`."""
        with torch.no_grad():
            operations: Callable[[], Tensor] = make_fx(compute)()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            with torch.no_grad():
                return operations()

        return replay
