"""Megatron at one rank, in the process of the tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
