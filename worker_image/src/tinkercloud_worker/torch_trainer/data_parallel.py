"""The torch trainer on one of several data-parallel ranks, each with a full copy of all weights."""

import torch.distributed as dist
from typing_extensions import override

from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.replicated import ReplicatedTrainer


class DataParallelTrainer(ReplicatedTrainer, TorchTrainer):
    """One rank of a data-parallel torch trainer; see `engine.ranks.RankTrainer`.

    Each rank receives its own shard of the examples, which may be empty, and accumulates their
    gradient.
    """

    @override
    def membership(self) -> Membership:
        """Return the membership of a rank that is a replica by itself."""
        return Membership(
            self.limits,
            replica=dist.get_rank(),
            answers=True,
            base_fingerprint=self.base_fingerprint,
        )
