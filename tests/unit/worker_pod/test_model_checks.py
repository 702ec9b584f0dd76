"""A head checks the model's folder for inference engines that read it."""

from pathlib import Path
from typing import Literal

import pytest

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.small_models.wrong_folders import UP, Fault, lost, prefixed, value
from tinkercloud_worker.build_sampler import check_model
from tinkercloud_worker.model.architecture import UnsupportedModelError


def a_head(folder: Path, kind: Literal["sglang", "vllm"], trainer: TrainerConfig) -> HeadConfig:
    servers = InferenceConfig(kind=kind, urls=("http://127.0.0.1:9",))
    return HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(folder)),
        token_file="",
        checkpoint_root=folder.as_uri(),
        scratch_dir=str(folder),
        trainer=trainer,
        sampler=SamplerConfig(backend="external", inference=servers),
    )


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lost(UP), f"missing in the files: {UP}"),
        (prefixed("module."), r"start with 'module\.'"),
        (value(UP, float("nan")), f"NaN or infinite values in {UP}"),
    ],
    ids=["missing", "renamed", "not a number"],
)
def test_a_model_with_wrong_files_is_rejected_before_engines_are_called(
    tmp_path: Path, kind: Literal["sglang", "vllm"], fault: Fault, message: str
) -> None:
    folder = save(tiny_llama(), tmp_path)
    samples_only = a_head(folder, kind, TrainerConfig(backend="none"))
    check_model(samples_only)
    fault(folder)

    with pytest.raises(UnsupportedModelError, match=message):
        check_model(samples_only)


def test_values_are_not_checked_if_a_trainer_loads_them(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    value(UP, float("nan"))(folder)

    check_model(a_head(folder, "sglang", TrainerConfig()))
