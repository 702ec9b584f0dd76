"""Exporting full models from megatron-core allocates no device memory."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tinkercloud_testing.ranks.megatron import taken_by_exporting
from tinkercloud_testing.small_models.models import save, tiny_qwen3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.long
def test_merged_matrices_are_split_on_the_cpu(tmp_path: Path) -> None:
    folder = str(save(tiny_qwen3(), tmp_path))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(taken_by_exporting, folder).result() == 0
