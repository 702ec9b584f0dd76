"""Counts the tokens that megatron-core's routers send to each expert.

The ranks of a replica count the positions that they hold, in their own layers. A pass ends with the
sum of these counts on all of them.

Shape legend: L layers of the model, E experts of a layer, S positions of a micro-batch on this
rank, T of them processed by this rank's routers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from tinkercloud_worker.megatron_trainer.sequence import MicroBatch


class RouterCounts:
    """Counts the tokens of this rank's routers, one pass at a time."""

    def __init__(self, module: GPTModel, device: torch.device) -> None:
        """Attach to a model, which may have no experts.

        Args:
            module: this rank's part of the model.
            device: the device of the counts.
        """
        self._layers, self._experts = module.config.num_layers, module.config.num_moe_experts
        self._device = device
        self._counts_LE: Tensor | None = None
        self._is_counted_T: Tensor | None = None
        """Which positions of the current micro-batch belong to an example."""
        for router in module.modules():
            if isinstance(router, TopKRouter):
                router.register_forward_hook(self._note)

    @contextmanager
    def counting(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Count the forward pass of a micro-batch, but not the recomputation of layers."""
        # A dummy has one position that belongs to no example.
        if self._experts and micro_batch.pack.examples:
            self._is_counted_T = self._seen_here(micro_batch)
        try:
            yield
        finally:
            self._is_counted_T = None

    def sum(self) -> Tensor | None:
        """Return the counts since the last call, int64 [layers with experts, E].

        Collective over the ranks of a replica. None if there are no experts or no examples.
        """
        if not self._experts:
            return None
        counts_LE, self._counts_LE = self._so_far(), None
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        ):
            dist.all_reduce(counts_LE, group=group)
        has_experts_L = counts_LE.sum(1) > 0
        return counts_LE[has_experts_L] if has_experts_L.any() else None

    def _so_far(self) -> Tensor:
        if self._counts_LE is None:
            shape = (self._layers, self._experts)
            self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return self._counts_LE

    def _seen_here(self, micro_batch: MicroBatch) -> Tensor:
        is_kept_S = torch.zeros(len(micro_batch.ids_S), dtype=torch.bool, device=self._device)
        is_kept_S[micro_batch.kept_M] = True
        # Between layers, tensor-parallel ranks hold equal, consecutive parts of the positions.
        parts = is_kept_S.chunk(parallel_state.get_tensor_model_parallel_world_size())
        here: Tensor = parts[parallel_state.get_tensor_model_parallel_rank()]
        return here

    def _note(self, router: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        if self._is_counted_T is None:
            return
        _, is_sent_TE = outputs
        # Layers are numbered from 1 over all pipeline stages.
        self._so_far()[int(router.layer_number) - 1] += is_sent_TE[self._is_counted_T].sum(0)  # type: ignore[arg-type] # an int, typed as any attribute
