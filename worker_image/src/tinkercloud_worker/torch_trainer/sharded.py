"""The torch trainer at one of several ranks over which the base's layers are sharded (FSDP2).

Each rank has its part of every layer and, while a layer computes, the whole of that one
(`sharded_base`). Adapters are whole at every rank, and so are the base's embeddings. Models that
are trained as a whole are divided as the base is, embeddings too (`sharded_model`). As gathering a
layer takes all ranks, all run the same number of passes: ranks with fewer packs run dummy passes.
"""

import gc
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from tinkercloud_worker.device.packing import PackedSequences
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.model.base_model import BaseModel
from tinkercloud_worker.model.lm_head import Unembedding
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded_model import ShardedModel
from tinkercloud_worker.torch_trainer.trainer import Routed
from tinkercloud_worker.training.adam import TrainedModel


class ShardedTrainer(DataParallelTrainer):
    """See `engine.ranks.RankTrainer`."""

    def __init__(
        self,
        base: BaseModel,
        mesh: DeviceMesh,
        *,
        max_batch_tokens: int,
        max_context_length: int | None = None,
        max_kept_tokens: Literal[0] | None = None,
    ) -> None:
        """Make a trainer without models.

        Args:
            base: the base model, shared out over the mesh (`sharded_base`).
            mesh: one dimension, all ranks.
            max_batch_tokens: as the torch trainer's.
            max_context_length: as the torch trainer's.
            max_kept_tokens: as the torch trainer's, but 0 or None: all ranks must gather alike.
        """
        super().__init__(
            base,
            max_batch_tokens=max_batch_tokens,
            max_context_length=max_context_length,
            max_kept_tokens=max_kept_tokens,
        )
        self._mesh = mesh

    @override
    def forward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> LossOutput:
        missing = self._missing_passes(batch)
        output = super().forward(model_id, batch, between)
        with torch.no_grad():
            for _ in range(missing):
                self._dummy_pass(model_id)
        sharding = self._models[model_id].sharding
        if isinstance(sharding, ShardedModel):
            sharding.release()
        return output

    @override
    def forward_backward(
        self, model_id: str, batch: Batch, between: Callable[[], None]
    ) -> LossOutput:
        missing = self._missing_passes(batch)
        output = super().forward_backward(model_id, batch, between)
        for _ in range(missing):
            routed, hidden_RD = self._dummy_pass(model_id)
            self._backward(routed, hidden_RD, torch.zeros_like(hidden_RD))
        return output

    @override
    def remove_model(self, model_id: str) -> None:
        super().remove_model(model_id)
        # What FSDP hangs on a whole model's modules refers to them, and they to it.
        gc.collect()

    def _full_model(self) -> TrainedModel:
        sharding = ShardedModel(self._base, self._mesh, recompute=self._max_kept_tokens == 0)
        return TrainedModel(None, sharding.trainable, sharding)

    def _hidden(self, routed: Routed, sequences: PackedSequences) -> Tensor:
        (_, model), *_ = routed
        if isinstance(model.sharding, ShardedModel):
            return model.sharding.hidden(sequences)
        return super()._hidden(routed, sequences)

    def _unembedding(self, routed: Routed) -> Unembedding:
        (_, model), *_ = routed
        if isinstance(model.sharding, ShardedModel):
            return model.sharding.unembedding()
        return super()._unembedding(routed)

    def _backward(self, routed: Routed, hidden_RD: Tensor, gradient_RD: Tensor) -> None:
        (_, model), *_ = routed
        if isinstance(model.sharding, ShardedModel):
            model.sharding.backward(hidden_RD, gradient_RD)
        elif hidden_RD.requires_grad:
            hidden_RD.backward(gradient_RD)

    def _missing_passes(self, batch: Batch) -> int:
        """Return how many passes this rank makes fewer than the rank with the most."""
        own = len(self._packs(batch))
        most = torch.tensor(own, device=self._base.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - own

    def _dummy_pass(self, model_id: str) -> tuple[Routed, Tensor]:
        ids_R = torch.zeros(1, dtype=torch.int64, device=self._base.device)
        routed = [(slice(0, 1), self._models[model_id])]
        return routed, self._hidden(routed, PackedSequences(ids_R, (1,)))
