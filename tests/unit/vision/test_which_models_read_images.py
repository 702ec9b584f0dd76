"""A model that reads no images says why, and which models do."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, TrainerConfig
from tinkercloud_worker.build_images import build_images
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.training.no_trainer import NoTrainer


def never_loaded() -> TorchBaseModel:
    raise AssertionError("images are rejected without a look at the weights")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("llama", "images of model_type 'llama' are not supported; .*: gemma3, qwen2_5_vl, "),
        ("mistral3", "images of model_type 'mistral3' are not supported; .*: gemma3, "),
        ("qwen3_vl", "its folder has no preprocessor_config.json"),
    ],
)
def test_images_are_rejected_with_the_reason(tmp_path: Path, model_type: str, reason: str) -> None:
    content = AutoConfig.for_model(model_type).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(tmp_path)),
        token_file="",
        checkpoint_root=tmp_path.as_uri(),
        scratch_dir=str(tmp_path),
        trainer=TrainerConfig(backend="none"),
    )

    images = build_images(config, never_loaded, NoTrainer(ModelLimits(100, 100)))

    assert images.processor is None
    assert images.refusal.startswith("this model reads text only")
    assert re.search(reason, images.refusal)
