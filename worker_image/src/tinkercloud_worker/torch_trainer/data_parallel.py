"""The torch trainer at one of several ranks, each with a whole copy of base and models."""

import torch.distributed as dist
from typing_extensions import override

from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.replicated import ReplicatedTrainer


class DataParallelTrainer(ReplicatedTrainer, TorchTrainer):
    """See `engine.ranks.RankTrainer`.

    Of passes each rank gets its own share of the examples, which may be empty, and adds up the
    gradient of those.
    """

    @override
    def membership(self) -> Membership:
        """Each rank is a replica of its own."""
        return Membership(
            self.limits,
            replica=dist.get_rank(),
            answers=True,
            base_fingerprint=self.base_fingerprint,
        )
