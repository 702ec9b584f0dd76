"""The torch trainer on one of several data-parallel ranks, each with a full copy of all weights."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.ranks import Membership, SharedPassFailed, SharingRank
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass
from tinkercloud_worker.lora.parameters import unchanged_if_it_fails
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.packing import PassOutput
from tinkercloud_worker.training.replicated import ReplicatedTrainer

log = logging.getLogger(__name__)


class DataParallelTrainer(ReplicatedTrainer, TorchTrainer, SharingRank):
    """One rank of a data-parallel torch trainer; see `engine.ranks.SharingRank`.

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
            reads_images=self.reads_images,
            max_shared_tokens=self._max_shared_tokens if self._base.takes_packs else 0,
            efficient_tokens=accelerator.efficient_tokens(self._base.device),
        )

    @override
    def adapter_size(self, lora_config: LoraConfig) -> int:
        return self._adapter_layout(lora_config).size

    @override
    def shared_pass(self, items: Sequence[TrainingPass]) -> Sequence[LossOutput]:
        """See `engine.ranks.SharingRank`.

        A pass of replicas needs no other rank, so a rank that fails can still say so.
        """
        changed = [
            self._models[item.model_id].trainable.gradient
            for item in items
            if item.batch.examples and not item.batch.forward_only
        ]
        try:
            with unchanged_if_it_fails(changed):
                outputs = self._part_of_shared_pass(items)
                self._check_all_succeeded()
        except SharedPassFailed:
            raise
        except Exception:
            log.exception("a shared pass failed at this rank")
            self._check_all_succeeded(failures=1)
            raise
        return outputs

    def _part_of_shared_pass(
        self, items: Sequence[TrainingPass], fillers: Sequence[TrainingPass] = ()
    ) -> list[LossOutput]:
        """Run this rank's examples as one micro-batch; return the output of each item.

        Args:
            items: the passes; the batches of some, or all, may be empty.
            fillers: passes that run along, and whose output nobody needs.
        """
        present = [*(item for item in items if item.batch.examples), *fillers]
        compute = self._evaluate if items[0].batch.forward_only else self._run
        models = self._models.together([item.model_id for item in present])
        outputs = iter(self._in_one_pass(present, models, compute) if present else ())
        return [
            next(outputs) if item.batch.examples else PassOutput().finish(item.batch)
            for item in items
        ]

    def _check_all_succeeded(self, failures: int = 0) -> None:
        """Wait for the other ranks.

        Raises:
            SharedPassFailed: at every rank, if one has failed.
        """
        total = torch.tensor(failures, device=self._base.device)
        dist.all_reduce(total)
        if int(total):
            raise SharedPassFailed(f"{int(total)} ranks could not compute a shared pass")
