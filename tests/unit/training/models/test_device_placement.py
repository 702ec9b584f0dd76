"""Training and sampling do not assume that tensors are on the CPU."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tinkercloud_testing.training.devices import trained_and_sampled


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_another_device_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        elsewhere = process.submit(trained_and_sampled, "elsewhere", tmp_path / "there").result()

    here = trained_and_sampled("cpu", tmp_path / "here")

    assert elsewhere.keys() == here.keys()
    for name, numbers in here.items():
        np.testing.assert_allclose(elsewhere[name], numbers, rtol=1e-4, atol=1e-4, err_msg=name)
