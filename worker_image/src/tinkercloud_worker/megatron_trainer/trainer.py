"""One rank of the megatron trainer: LoRA or full fine-tuning over a distributed base.

Passes use megatron-core's own schedules over packed sequences. Adapters are replicated on every
rank, with partial gradients (`adapters`), so that steps, states and names are the same as for any
replicated model; tensors specific to each expert are only on the ranks of the expert
(`sharded_adapter`). Fully fine-tuned models are sharded like the base (`sharded_model`). With
context parallelism, each rank computes the logprobs of its positions, and all ranks compute the
loss of the full sequences.

Shape legend: S positions of a micro-batch on this rank, R positions that belong to an example, M of
them on this rank, D hidden size, K targets per position.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.func import functional_call
from typing_extensions import override

from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker import losses
from tinkercloud_worker.engine.batch import Batch, ModelLimits, capped_context_length
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.tensor_slices import TensorSlice
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.losses import Loss
from tinkercloud_worker.megatron_trainer.adapters import Active
from tinkercloud_worker.megatron_trainer.logprobs import (
    frozen_output_layer,
    logprobs,
    trained_output_layer,
)
from tinkercloud_worker.megatron_trainer.mixtures import with_dummy_packs
from tinkercloud_worker.megatron_trainer.model import MegatronModel
from tinkercloud_worker.megatron_trainer.router_counts import RouterCounts
from tinkercloud_worker.megatron_trainer.sequence import MicroBatch, SequenceDivision
from tinkercloud_worker.megatron_trainer.sharded_adapter import ShardedAdapter, divide
from tinkercloud_worker.megatron_trainer.sharded_model import MegatronShardedModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.training.collate import PassOutput, pack_all
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.replicated import ReplicatedTrainer
from tinkercloud_worker.training.trained_model import TrainedModel, new_adapter


class MegatronTrainer(ReplicatedTrainer):
    """See `engine.ranks.RankTrainer`. With one rank it is a complete `Trainer`."""

    def __init__(
        self,
        base: MegatronModel,
        *,
        max_batch_tokens: int,
        max_context_length: int | None = None,
        max_kept_tokens: int | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Create a trainer without models. Collective over all ranks.

        Args:
            base: this rank's part of the base model.
            max_batch_tokens: maximum tokens of a micro-batch, including the padding for context
                parallelism; a longer example gets its own.
            max_context_length: maximum tokens of an example; None means the base model's.
            max_kept_tokens: as in the torch trainer; None or 0 with expert parallelism, because all
                ranks must recompute the same passes.
            memory: as in the torch trainer.
        """
        config: Any = base.hf_config
        longest = capped_context_length(max_context_length, config.max_position_embeddings)
        limits = ModelLimits(config.vocab_size, longest)
        super().__init__(limits, base.module.config.params_dtype, memory)
        self._base = base
        self.base_fingerprint = base.fingerprint
        self._device = base.device.torch_device
        self._router_counts = RouterCounts(base.module, self._device)
        self._division = SequenceDivision(parallel_state.get_context_parallel_group())
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._pad_to_multiple_of = tensor * self._division.multiple
        self._max_batch_tokens = max_batch_tokens
        self._max_kept_tokens = max_kept_tokens

    @override
    def membership(self) -> Membership:
        return Membership(
            self.limits,
            replica=parallel_state.get_data_parallel_rank(),
            answers=parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0,
            base_fingerprint=self.base_fingerprint,
            pad_to_multiple_of=self._pad_to_multiple_of,
        )

    @override
    def forward(self, model_id: str, batch: Batch, yield_point: Callable[[], None]) -> LossOutput:
        output = self._pass(model_id, batch, "forward")
        yield_point()
        return output

    @override
    def forward_backward(
        self, model_id: str, batch: Batch, yield_point: Callable[[], None]
    ) -> LossOutput:
        output = self._pass(model_id, batch, "forward_backward")
        yield_point()
        return output

    def _new_model(self, lora_config: LoraConfig | None) -> TrainedModel:
        if lora_config is None:
            sharding = MegatronShardedModel(
                self._base.module, self._base.sources, self._base.layout
            )
            return TrainedModel(None, sharding.trainable, sharding)
        return self._new_adapter(lora_config)

    def _new_adapter(self, config: LoraConfig) -> TrainedModel:
        targets = adapters.select(self._base.targets, config)
        if not _is_divided(targets):
            return new_adapter(targets, config, self._device)
        sharding = ShardedAdapter(targets, config, self._slices(config), self._device)
        return TrainedModel(config, sharding.trainable, sharding)

    @override
    def adapter_size(self, lora_config: LoraConfig) -> int:
        targets = adapters.select(self._base.targets, lora_config)
        whole = adapters.layout(targets, lora_config.rank)
        if not _is_divided(targets):
            return whole.size
        common, here = divide(targets, whole, self._slices(lora_config))
        return sum(math.prod(block.shape) for block in (*common, *here))

    def _slices(self, config: LoraConfig) -> list[TensorSlice]:
        """Return this rank's slices of tensors that are specific to each expert."""
        return [block for layer in self._base.experts for block in layer.slices(config.rank)]

    def _pass(self, model_id: str, batch: Batch, kind: str) -> LossOutput:
        model = self._models[model_id]
        output = PassOutput()
        packs = pack_all(batch, self._max_batch_tokens, self._device, self._pad_to_multiple_of)
        micro_batches = [
            self._division.micro_batch(pack, self._pad_to_multiple_of)
            for pack in with_dummy_packs(list(packs), self._device)
        ]
        if micro_batches:
            self._base.linears.active = _active(model)
            try:
                with self._memory.measured([model]):
                    self._schedule(model, micro_batches, batch.loss, output, kind)
            finally:
                self._base.linears.active = None
            expert_tokens_LE = self._router_counts.sum()
            if expert_tokens_LE is not None:
                output.count(expert_tokens_LE)
        return output.finish(batch)

    def _schedule(
        self,
        model: TrainedModel,
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
        output: PassOutput,
        kind: str,
    ) -> None:
        # Once for all micro-batches, several of which are in flight in a pipeline.
        replaced, most = self._replaced_weights(model), self._max_kept_tokens
        output_layer = cache(partial(self._output_layer, model))

        def step(batches: Iterator[MicroBatch], module: GPTModel) -> tuple[Tensor, Any]:
            micro_batch = next(batches)
            tokens = sum(micro_batch.sequences.lengths)
            self._base.layers.recompute = most is not None and tokens > most
            # Rotary positions and the mask are derived from the sequences.
            given = (micro_batch.ids_S[None], None, None)
            packed = {"packed_seq_params": micro_batch.sequences}
            with self._router_counts.counting(micro_batch):
                result = functional_call(module, replaced, given, packed)
            return result, partial(self._loss, micro_batch, output_layer, loss, output)

        is_forward = kind == "forward"
        # megatron-core would otherwise record a graph even without a backward pass.
        with self._base.device.computing(), torch.set_grad_enabled(not is_forward):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(micro_batches),
                model=self._base.module,
                num_microbatches=len(micro_batches),
                # Shapes differ between micro-batches, so they are sent with them.
                seq_length=len(micro_batches[0].ids_S),
                micro_batch_size=1,
                forward_only=is_forward,
            )

    def _loss(
        self,
        micro_batch: MicroBatch,
        output_layer: Callable[[], LMHead],
        loss: Loss,
        output: PassOutput,
        hidden_S1D: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Collect the results of a micro-batch; return the scalar that starts its backward pass.

        Called on the last stage. The sum of logprobs times the derivative of the loss has the same
        gradient as the loss; only this gradient matters, and each rank has a part of the sum.
        """
        number = torch.tensor(0, dtype=torch.int, device=hidden_S1D.device)
        pack, places_M = micro_batch.pack, micro_batch.places_M
        if not pack.examples:
            # Other ranks wait for the backward pass of the experts of their tokens.
            return hidden_S1D.sum() * 0.0, number, {}
        # Each rank's part of the vocabulary contributes a partial gradient.
        hidden_S1D = gather_from_sequence_parallel_region(hidden_S1D)
        lp_MK = logprobs(
            output_layer(),
            hidden_S1D[:, 0][micro_batch.kept_M],
            pack.targets_RK[places_M],
            parallel_state.get_tensor_model_parallel_group(),
            self.limits.vocab_size,
        )
        lp_RK = lp_MK.new_zeros(pack.targets_RK.shape)
        lp_RK[places_M] = lp_MK.detach()
        dist.all_reduce(lp_RK, group=self._division.group)
        loss_sum, derivative_RK = losses.derivative(loss, lp_RK, pack.inputs)
        output.add(pack, lp_RK, loss_sum)
        return (lp_MK * derivative_RK[places_M]).sum(), number, {}

    def _output_layer(self, model: TrainedModel) -> LMHead:
        """Return the LM head of the last stage: a full model's own, or the base's."""
        module, name = self._base.module, self._base.lm_head_weight
        if isinstance(model.sharding, MegatronShardedModel):
            return trained_output_layer(model.trainable.tensors[name], self._dtype)
        active = self._base.linears.active
        return frozen_output_layer(module.get_parameter(name), self._base.lm_head, active)

    def _replaced_weights(self, model: TrainedModel) -> dict[str, Tensor]:
        """Return the replacements of the base's weights, which are none for an adapter."""
        if not isinstance(model.sharding, MegatronShardedModel):
            return {}
        return model.sharding.weights(self._dtype)


def _is_divided(targets: Sequence[adapters.Target]) -> bool:
    """Whether an adapter of these targets is divided over ranks; see `sharded_adapter`."""
    between: dist.ProcessGroup = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return between.size() > 1 and any(target.experts for target in targets)


def _active(model: TrainedModel) -> Active | None:
    if model.lora is None:
        return None
    return Active(model.trainable.tensors, adapters.scale(model.lora.rank))
