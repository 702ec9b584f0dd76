"""Models that are replicated or sharded over ranks, each computing part of the gradient.

Between steps the gradient of a model is the sum of the ranks' gradients. It is reduced once per
step, so all ranks that hold the same weights get the same bits, apply the same update independently
and stay identical. For a sharded model (`engine.ranks.Sharding`), each rank updates its shard.
"""

import hashlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.memory_report import MemoryReport
from tinkercloud_worker.engine.ranks import Outline, RankTrainer, Sharding, Share
from tinkercloud_worker.engine.tensor_slices import Piece, batches, full_slice, joined
from tinkercloud_worker.engine.trainer import Gradient, OptimizerStep, TrainingState
from tinkercloud_worker.training.adam import (
    AdamTrainer,
    on_cpu,
    state_of,
    state_vectors,
    step_of,
)
from tinkercloud_worker.training.trained_model import TrainedModel

_BATCH_BYTES = 64 << 20
"""Bytes that a rank exports at a time."""


def ranks_on_this_machine() -> int:
    """Return the number of ranks that share this machine, or this pod. Collective."""
    host = hashlib.sha256(socket.gethostname().encode()).digest()
    own = torch.tensor([int.from_bytes(host[:7])])
    others = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    return sum(bool(own == other) for other in others)


class ReplicatedTrainer(AdamTrainer, RankTrainer):
    """A rank's trainer. `torch.distributed` must be initialized; all ranks get the same calls."""

    @override
    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """Add a model on every rank, with rank 0's initial values: seeds may differ."""
        super().add_model(model_id, lora_config)
        model = self._models[model_id]
        if lora_config is not None and model.sharding is None:
            dist.broadcast(model.trainable.flat.detach(), src=0)

    @override
    def memory(self) -> MemoryReport:
        report = self._memory.report()
        # The head pages adapters only.
        sizes = {
            name: replace(size, can_leave=False) if self._models.is_whole(name) else size
            for name, size in report.models.items()
        }
        return replace(report, models=sizes)

    @override
    def page_out(self, model_ids: Sequence[str]) -> MemoryReport:
        self._models.page_out(model_ids)
        return self.memory()

    @override
    def page_in(self, model_ids: Sequence[str]) -> MemoryReport:
        self._models.page_in(model_ids)
        return self.memory()

    @override
    def sum_gradient(self, model_id: str) -> None:
        model = self._models[model_id]
        _reduce(model, model.trainable.gradient)
        sharding = _sharding(model)
        model.grad_norm = sharding.grad_norm(model.trainable.gradient) if sharding else None

    @override
    def sum_gradients(self, model_ids: Sequence[str]) -> None:
        for model_id in model_ids:
            self.sum_gradient(model_id)

    @override
    def optim_steps(self, steps: Sequence[OptimizerStep]) -> Sequence[Mapping[str, float]]:
        try:
            return self.stepper.run_batch(steps, lambda: None)
        except InvalidRequest:
            for step in steps:
                self._unsum_gradient(step.model_id)
            raise

    def _unsum_gradient(self, model_id: str) -> None:
        """Change the ranks' gradients so that their sum equals that of each rank."""
        model = self._models[model_id]
        if model.sharding is not None:
            model.sharding.unreduce_gradient(model.trainable.gradient)
        elif dist.get_rank() != 0:
            self.discard_gradient(model_id)

    @override
    def share_weights(self, model_id: str) -> Share:
        model, (weights, *_) = self._models.contents(model_id)
        return self._share(model, {"": weights})

    @override
    def share_published(self, model_id: str) -> Share:
        model, (weights, *_) = self._models.contents(model_id)
        return self._share(model, {"": weights}, self._published_dtype(model))

    @override
    def share_state(self, model_id: str) -> Share:
        model, vectors = self._models.contents(model_id)
        return self._share(model, state_vectors(vectors))

    @override
    def share_gradient(self, model_id: str) -> Share:
        """See `engine.ranks.RankTrainer`.

        The ranks sum copies on the CPU over gloo, which takes no GPU memory.
        """
        model, (_, gradient, *_) = self._models.contents(model_id)
        total = gradient.to("cpu", copy=True)
        _reduce(model, total)
        return self._share(model, {"": total})

    @override
    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """Replace the gradient so that the sum over ranks equals the given one."""
        super().import_gradient(model_id, gradient)
        self._unsum_gradient(model_id)

    @override
    def salvage(self) -> Mapping[str, TrainingState]:
        whole = [name for name, model in list(self._models.items()) if not _sharding(model)]
        with accelerator.side_stream():
            return {name: state_of(*self._models.contents(name), _copied) for name in whole}

    def _share(
        self,
        model: TrainedModel,
        vectors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Share:
        """Yield this rank's share of flat vectors, by what follows the names of their tensors."""
        shared_bytes = 0
        for suffix, flat in vectors.items():
            pieces = (
                replace(piece, block=replace(piece.block, name=piece.block.name + suffix))
                for piece in _shared_pieces(model, flat, dtype)
            )
            for batch in batches(pieces, _BATCH_BYTES):
                shared_bytes += sum(piece.values.nbytes for piece in batch)
                yield batch
        return Outline(model.lora, step_of(model), shared_bytes)

    def _to_cpu(
        self, model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
    ) -> Mapping[str, Tensor]:
        """Return the full tensors of a model that this rank has all of."""
        return _copied(model, flat, dtype)


def _shared_pieces(model: TrainedModel, flat: Tensor, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield what this rank contributes of a flat vector: rank 0 what every rank has."""
    views = model.trainable.layout.views(flat)
    if model.sharding is not None:
        shared = {name: view for name, view in views.items() if name in model.sharding.shared}
        yield from model.sharding.pieces(shared, dtype)
    elif dist.get_rank() == 0:
        for name, view in views.items():
            shape = tuple(view.shape)
            yield Piece(full_slice(name, shape), shape, view.cpu().to(dtype))


def _copied(
    model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
) -> Mapping[str, Tensor]:
    """Return a copy of full tensors, which this rank must have, on the CPU."""
    layout = model.trainable.layout
    if model.sharding is not None:
        return joined(model.sharding.pieces(layout.views(flat), dtype))
    return layout.views(on_cpu(flat, dtype))


def _sharding(model: TrainedModel) -> Sharding | None:
    """Return how a model is sharded, if no rank holds all of it."""
    return None if model.sharding is None or model.sharding.is_whole else model.sharding


def _reduce(model: TrainedModel, gradient: Tensor) -> None:
    if model.sharding is None:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    else:
        model.sharding.reduce_gradient(gradient)
