"""Which files of a model the mirror serves."""

from pathlib import Path

from tinkercloud_api.routes.models.hub_mirror import tokenizer_files

SERVED = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def test_files_of_image_processors_are_served_and_weights_are_not(tmp_path: Path) -> None:
    for name in (*SERVED, "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")

    assert [file.name for file in tokenizer_files(tmp_path)] == list(SERVED)
