"""The BaseModels of a cluster as clients see them."""

from pathlib import Path
from typing import Any

import pytest

from tinkercloud_api.providers.served_models import served_model
from tinkercloud_testing.resources.sessions import a_base_model
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.small_models.vision_models import save_vision_model

VOLUME = {"volume": {"claimName": "models", "path": "one"}}
WORKERS = {"replicas": 1, "cpuRanksPerReplica": 1}
MEGATRON = {"backend": "megatron", "replicas": 1, "gpusPerReplica": 1}


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of volumes, with a vision-language model."""
    folder = tmp_path_factory.mktemp("images")
    save_vision_model(folder / "models" / "one")
    return folder


def test_a_model_on_a_mounted_volume_reads_images_if_its_files_say_so(
    of_images: Path, tmp_path: Path
) -> None:
    save(tiny_llama(), tmp_path / "models" / "one")
    spec = a_base_model(source=VOLUME)

    assert served_model(spec, of_images).reads_images
    assert served_model(a_base_model(source=VOLUME, trainer=WORKERS), of_images).reads_images
    assert served_model(spec, of_images).local_path == str(of_images / "models" / "one")
    assert not served_model(spec, tmp_path).reads_images


@pytest.mark.parametrize(
    "fields",
    [{"source": VOLUME, "trainer": MEGATRON}, {"source": {"repository": "tiny/qwen-vl"}}],
    ids=["the megatron trainer", "a repository"],
)
def test_images_are_not_offered_where_they_are_refused_or_the_files_are_unknown(
    of_images: Path, fields: dict[str, Any]
) -> None:
    assert not served_model(a_base_model(**fields), of_images).reads_images


def test_a_volume_that_is_not_mounted_is_no_local_folder(tmp_path: Path) -> None:
    for mounted in (None, tmp_path):
        assert served_model(a_base_model(source=VOLUME), mounted).local_path is None
