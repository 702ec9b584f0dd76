"""Fixtures for megatron-core with one rank, in the test process."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, missing in __all__

PATIENCE = timedelta(seconds=90)
"""How long ranks wait for each other, if there were others."""


@pytest.fixture
def alone() -> Iterator[timedelta]:
    """Be the one rank of a group, and give its patience."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    yield PATIENCE
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
