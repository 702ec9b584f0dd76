"""Libraries whose versions must be equal in heads and SGLang engines."""

import tomllib
from pathlib import Path

import pytest

from tinkercloud_testing.sglang.source import requirements

pytestmark = pytest.mark.slow

LOCK = tomllib.loads((Path(__file__).parents[3] / "uv.lock").read_text())
NCCL_OF_TORCH = {"torch==2.14.1": "2.30.7"}
"""Which version of `nvidia-nccl-cu13` torch's wheel requires: NCCL refuses ranks of another."""


def test_the_locked_nccl_version_equals_that_of_the_torch_for_sglang() -> None:
    [torch] = [found for found in requirements() if found.startswith("torch==")]
    locked = {package["name"]: package["version"] for package in LOCK["package"]}

    assert locked["nvidia-nccl-cu13"] == NCCL_OF_TORCH[torch]
