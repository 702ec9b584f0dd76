"""The tiny model of the servers in these tests."""

from pathlib import Path

import pytest

from tinkercloud_testing.small_models.models import save, tiny_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model to serve."""
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
