"""Counts the tokens that megatron-core's routers send to each expert.

The ranks of a replica count the positions that they hold, in their own layers, separately for each
model of the pass. A pass ends with the sum of these counts on all of them.

Shape legend: G models of a pass, L layers of the base, E experts of a layer, S positions of a
micro-batch on this rank, T of them processed by this rank's routers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from tinkercloud_worker.megatron_trainer.layers.sequence import MicroBatch


class MegatronRouterCounts:
    """Counts the tokens of this rank's routers, one pass at a time."""

    def __init__(self, module: GPTModel, device: torch.device) -> None:
        """Attach to a model, which may have no experts.

        Args:
            module: this rank's part of the model.
            device: the device of the counts.
        """
        self._layers, self._experts = module.config.num_layers, module.config.num_moe_experts
        self._device = device
        self._counts_GLE: Tensor | None = None
        self._is_counted_GT: Sequence[Tensor] = ()
        """Which positions of the current micro-batch belong to an example of each model."""
        for router in module.modules():
            if isinstance(router, TopKRouter):
                router.register_forward_hook(self._note)

    @contextmanager
    def counting(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Count the forward pass of a micro-batch, but not the recomputation of layers."""
        if self._experts:
            if self._counts_GLE is None:
                shape = (len(micro_batch.parts), self._layers, self._experts)
                self._counts_GLE = torch.zeros(shape, dtype=torch.int64, device=self._device)
            # A dummy has one position that belongs to no example.
            if micro_batch.has_examples:
                self._is_counted_GT = self._seen_here(micro_batch)
        try:
            yield
        finally:
            self._is_counted_GT = ()

    def sums(self, models: int) -> Sequence[Tensor | None]:
        """Return the counts of each model since the last call, int64 [layers with experts, E].

        Collective over the ranks of a replica, after at least one micro-batch. None for a model
        without examples, and if there are no experts.

        Args:
            models: number of models of the pass.
        """
        counts_GLE, self._counts_GLE = self._counts_GLE, None
        if counts_GLE is None:
            return [None] * models
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        ):
            dist.all_reduce(counts_GLE, group=group)
        has_experts_GL = counts_GLE.sum(2) > 0
        return [
            counts_LE[has_experts_L] if has_experts_L.any() else None
            for counts_LE, has_experts_L in zip(counts_GLE, has_experts_GL, strict=True)
        ]

    def _seen_here(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        seen = []
        for part in micro_batch.parts:
            is_kept_S = torch.zeros(len(micro_batch.ids_S), dtype=torch.bool, device=self._device)
            is_kept_S[micro_batch.kept_M[part.kept]] = True
            # Between layers, tensor-parallel ranks hold equal, consecutive parts of the positions.
            parts = is_kept_S.chunk(parallel_state.get_tensor_model_parallel_world_size())
            seen.append(parts[parallel_state.get_tensor_model_parallel_rank()])
        return seen

    def _note(self, router: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        if self._counts_GLE is None or not self._is_counted_GT:
            return
        _, is_sent_TE = outputs
        # Layers are numbered from 1 over all pipeline stages.
        layer = int(router.layer_number) - 1  # type: ignore[arg-type] # an int, typed as any attribute
        for counts_LE, is_counted_T in zip(self._counts_GLE, self._is_counted_GT, strict=True):
            counts_LE[layer] += is_sent_TE[is_counted_T].sum(0)
