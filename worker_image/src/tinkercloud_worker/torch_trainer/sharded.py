"""The torch trainer on one of several ranks that shard the layers of the base (FSDP2).

Each rank stores its shard of every layer and gathers a full layer only while it computes
(`sharded_base`). Adapters and the embeddings of the base are replicated. Fully fine-tuned models
are sharded like the base, including their embeddings (`sharded_model`). Gathering a layer is
collective, so all ranks run the same number of passes: ranks with fewer packs run dummy passes. A
pass that adapters share is one micro-batch at every rank; a rank without examples runs one token.
"""

import gc
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.engine.ranks import client_errors_lose_the_group
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded_model import ShardedModel
from tinkercloud_worker.torch_trainer.trainer import ModelSegments
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.trained_model import TrainedModel


class ShardedTrainer(DataParallelTrainer):
    """One rank of a trainer whose base is sharded; see `engine.ranks.RankTrainer`."""

    def __init__(
        self,
        base: TorchBaseModel,
        mesh: DeviceMesh,
        *,
        max_batch_tokens: int,
        max_shared_tokens: int | None = None,
        max_context_length: int | None = None,
        max_kept_tokens: Literal[0] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Create a trainer without models.

        Args:
            base: the base model, sharded over the mesh (`sharded_base`).
            mesh: a one-dimensional mesh of all ranks.
            max_batch_tokens: as in the torch trainer.
            max_shared_tokens: as in the torch trainer.
            max_context_length: as in the torch trainer.
            max_kept_tokens: as in the torch trainer, but only 0 or None: all ranks must gather the
                same layers at the same time.
            memory: as in the torch trainer.
        """
        super().__init__(
            base,
            max_batch_tokens=max_batch_tokens,
            max_shared_tokens=max_shared_tokens,
            max_context_length=max_context_length,
            max_kept_tokens=max_kept_tokens,
            memory=memory,
        )
        self._mesh = mesh

    @override
    def forward(self, model_id: str, batch: Batch) -> LossOutput:
        missing = self._missing_passes(batch)
        output = super().forward(model_id, batch)
        with torch.no_grad():
            for _ in range(missing):
                self._dummy_pass(model_id)
        sharding = self._models[model_id].sharding
        if isinstance(sharding, ShardedModel):
            sharding.release()
        return output

    @override
    def forward_backward(self, model_id: str, batch: Batch) -> LossOutput:
        missing = self._missing_passes(batch)
        output = super().forward_backward(model_id, batch)
        for _ in range(missing):
            model_segments, hidden_RD = self._dummy_pass(model_id)
            self._backward(model_segments, hidden_RD, torch.zeros_like(hidden_RD))
        return output

    @override
    def shared_pass(self, items: Sequence[TrainingPass]) -> Sequence[LossOutput]:
        """See `engine.ranks.SharingRank`: ranks need each other, so a failure loses the group.

        The gradients need no copies from before: they are lost with the group.
        """
        with client_errors_lose_the_group():
            return self._part_of_shared_pass(items, self._fillers(items))

    def _fillers(self, items: Sequence[TrainingPass]) -> list[TrainingPass]:
        """Return what this rank must compute in addition, so that it gathers what others gather.

        A forward pass gathers all layers, if it has any rows. A backward pass gathers them down to
        the first that an adapter in the pass trains, so each rank needs rows of a model that
        trains as early a layer as any of the pass.
        """
        present = [item for item in items if item.batch.examples]
        if items[0].batch.forward_only:
            return [] if present else [_without_effect(items[0], 1)]
        first = min(items, key=self._first_layer)
        if any(self._first_layer(item) == self._first_layer(first) for item in present):
            return []
        return [_without_effect(first, present[0].batch.num_targets if present else 1)]

    def _first_layer(self, item: TrainingPass) -> int:
        return self._base.first_layer_of(self._models[item.model_id].trainable.tensors)

    @override
    def remove_model(self, model_id: str) -> None:
        super().remove_model(model_id)
        # The state that FSDP attaches to the modules of a full model forms reference cycles with
        # them.
        gc.collect()

    def _full_model(self) -> TrainedModel:
        sharding = ShardedModel(self._base, self._mesh, recompute=self._max_kept_tokens == 0)
        return TrainedModel(None, sharding.trainable, sharding)

    def _hidden(self, model_segments: ModelSegments, sequences: PackedSequences) -> Tensor:
        (_, model), *_ = model_segments
        if isinstance(model.sharding, ShardedModel):
            return model.sharding.hidden(sequences)
        return super()._hidden(model_segments, sequences)

    def _lm_head_layer(self, model_segments: ModelSegments) -> LMHead:
        (_, model), *_ = model_segments
        if isinstance(model.sharding, ShardedModel):
            return model.sharding.lm_head()
        return super()._lm_head_layer(model_segments)

    def _backward(
        self, model_segments: ModelSegments, hidden_RD: Tensor, gradient_RD: Tensor
    ) -> None:
        (_, model), *_ = model_segments
        if isinstance(model.sharding, ShardedModel):
            model.sharding.backward(hidden_RD, gradient_RD)
        elif hidden_RD.requires_grad:
            hidden_RD.backward(gradient_RD)

    def _missing_passes(self, batch: Batch) -> int:
        """Return how many fewer passes this rank runs than the rank with the most."""
        own = sum(1 for _ in self._packs(batch))
        most = torch.tensor(own, device=self._base.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - own

    def _dummy_pass(self, model_id: str) -> tuple[ModelSegments, Tensor]:
        ids_R = torch.zeros(1, dtype=torch.int64, device=self._base.device)
        model_segments = [(slice(0, 1), self._models[model_id])]
        return model_segments, self._hidden(model_segments, PackedSequences(ids_R, (1,)))


def _without_effect(item: TrainingPass, num_targets: int) -> TrainingPass:
    """Return a pass of the same model and kind, of one token whose targets have no weight."""
    example = Example(
        tokens=np.zeros(1, np.int32),
        targets=np.zeros((1, num_targets), np.int64),
        inputs={"weights": np.zeros((1, num_targets), np.float32)},
        is_flat=False,
    )
    return TrainingPass(item.model_id, Batch([example], "cross_entropy", item.batch.forward_only))
