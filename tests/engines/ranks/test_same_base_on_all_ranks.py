"""All ranks and the session head must load the same base model."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, TrainerOf
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.small_models.wrong_folders import UP, value
from tinkercloud_worker.actors.rank_group import RanksUnavailable
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rank_of(folders: list[str]) -> DataParallelTrainer:
    """Return the trainer of a rank that has a folder of its own."""
    base = TorchBaseModel.load(folders[dist.get_rank()], torch.float32)
    return DataParallelTrainer(base, max_batch_tokens=BATCH_TOKENS)


def test_ranks_whose_folders_hold_different_models_do_not_train_together(
    trainer_of: TrainerOf, tmp_path: Path
) -> None:
    one, same, other = (str(save(tiny_llama(), tmp_path / name)) for name in ("1", "2", "3"))
    value(UP, 0.5)(Path(other))

    together = trainer_of(2, partial(rank_of, [one, same]))

    assert together.base_fingerprint == fingerprint_of(one)
    with pytest.raises(RanksUnavailable, match="the model files at rank 1"):
        trainer_of(2, partial(rank_of, [one, other]))
