"""Files of published weights are written completely or not at all."""

from pathlib import Path

import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.storage.disks import no_files_over
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.inference.weights_folder import WeightsFolder

MODULE = "model.layers.0.self_attn.q_proj"
WEIGHTS = WeightsCopy(
    LoraConfig(rank=4),
    {
        f"{MODULE}.lora_A.weight": torch.zeros(4, 1 << 16),
        f"{MODULE}.lora_B.weight": torch.zeros(8, 4),
    },
)


def test_weights_that_do_not_fit_leave_nothing_behind(tmp_path: Path) -> None:
    folder = WeightsFolder(
        tmp_path, server_dir=None, owner="head", base_path=tmp_path, base_model="tiny/llama"
    )

    with (
        no_files_over(1 << 19),
        pytest.raises(Unavailable, match="File too large; enlarge its volume"),
    ):
        folder.write(WEIGHTS)

    assert list(tmp_path.iterdir()) == []
    assert folder.find(folder.write(WEIGHTS)).size_of("adapter_config.json") > 0
