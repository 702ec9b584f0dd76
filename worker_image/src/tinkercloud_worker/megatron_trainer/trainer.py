"""One rank of the megatron trainer: LoRA or full fine-tuning over a distributed base.

Passes use megatron-core's own schedules over packed sequences. Adapters are replicated on every
rank, with partial gradients (`adapters`), so that steps, states and names are the same as for any
replicated model; tensors specific to each expert are only on the ranks of the expert
(`sharded_adapter`). Fully fine-tuned models are sharded like the base (`sharded_model`). With
context parallelism, each rank computes the logprobs of its positions, and all ranks compute the
loss of the full sequences. Small requests of several adapters share a pass of one micro-batch, in
which every rank knows whose positions it holds (`sequence.Part`).

Shape legend: S positions of a micro-batch on this rank, R positions that belong to an example, M of
them on this rank, D hidden size, K targets per position.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker import losses
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.batch import Batch, ModelLimits, capped_context_length
from tinkercloud_worker.engine.ranks import (
    Membership,
    SharingRank,
    client_errors_lose_the_group,
)
from tinkercloud_worker.engine.tensor_slices import TensorSlice
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.megatron_trainer.layers.megatron_adapters import Active
from tinkercloud_worker.megatron_trainer.layers.megatron_router_counts import MegatronRouterCounts
from tinkercloud_worker.megatron_trainer.layers.mixtures import (
    dummy_pack,
    empty_pack,
    with_dummy_packs,
)
from tinkercloud_worker.megatron_trainer.layers.sequence import MicroBatch, SequenceDivision
from tinkercloud_worker.megatron_trainer.layers.vocabulary_logprobs import (
    frozen_output_layer,
    logprobs,
    trained_output_layer,
)
from tinkercloud_worker.megatron_trainer.model import MegatronModel
from tinkercloud_worker.megatron_trainer.sharded_adapter import ShardedAdapter, divide
from tinkercloud_worker.megatron_trainer.sharded_model import MegatronShardedModel
from tinkercloud_worker.model import architecture
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.packing import Pack, PassOutput, pack_all
from tinkercloud_worker.training.replicated import ReplicatedTrainer
from tinkercloud_worker.training.trained_model import TrainedModel, new_adapter


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """What is computed for one model of a pass."""

    model: TrainedModel
    batch: Batch
    output: PassOutput = field(default_factory=PassOutput)


class MegatronTrainer(ReplicatedTrainer, SharingRank):
    """See `engine.ranks.SharingRank`. With one rank it is a complete `Trainer`."""

    def __init__(
        self,
        base: MegatronModel,
        *,
        max_batch_tokens: int,
        max_shared_tokens: int | None = None,
        max_context_length: int | None = None,
        max_kept_tokens: int | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Create a trainer without models. Collective over all ranks.

        Args:
            base: this rank's part of the base model.
            max_batch_tokens: maximum tokens of a micro-batch, including the padding for context
                parallelism; a longer example gets its own.
            max_shared_tokens: as in the torch trainer, including the same padding.
            max_context_length: maximum tokens of an example; None means the base model's.
            max_kept_tokens: as in the torch trainer; None or 0 with expert parallelism, because all
                ranks must recompute the same passes.
            memory: as in the torch trainer.
        """
        config: Any = base.hf_config
        longest = capped_context_length(max_context_length, architecture.max_context_length(config))
        limits = ModelLimits(config.vocab_size, longest)
        super().__init__(limits, base.module.config.params_dtype, memory)
        self._base = base
        self.base_fingerprint = base.fingerprint
        self._device = base.device.torch_device
        self._router_counts = MegatronRouterCounts(base.module, self._device)
        self._division = SequenceDivision(parallel_state.get_context_parallel_group())
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._pad_to_multiple_of = tensor * self._division.multiple
        self._max_batch_tokens = max_batch_tokens
        self._max_shared_tokens = min(
            max_batch_tokens, max_batch_tokens if max_shared_tokens is None else max_shared_tokens
        )
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
            max_shared_tokens=self._max_shared_tokens,
            efficient_tokens=accelerator.efficient_tokens(self._device),
        )

    @override
    def forward(self, model_id: str, batch: Batch) -> LossOutput:
        return self._pass(model_id, batch, is_forward=True)

    @override
    def forward_backward(self, model_id: str, batch: Batch) -> LossOutput:
        return self._pass(model_id, batch, is_forward=False)

    @override
    def shared_pass(self, items: Sequence[TrainingPass]) -> Sequence[LossOutput]:
        """See `engine.ranks.SharingRank`: ranks need each other, so a failure loses the group."""
        with client_errors_lose_the_group():
            return self._shared_pass(items)

    def _shared_pass(self, items: Sequence[TrainingPass]) -> list[LossOutput]:
        runs = [_Run(self._models[item.model_id], item.batch) for item in items]
        packs = [self._only_pack(item.batch) for item in items]
        has_examples = any(pack.examples for pack in packs)
        if not has_examples:
            # Other replicas may have tokens for the experts of this one.
            packs[0] = dummy_pack(self._device)
        if has_examples or parallel_state.get_expert_model_parallel_world_size() > 1:
            micro_batch = self._division.micro_batch(packs, self._pad_to_multiple_of)
            self._compute(runs, [micro_batch], is_forward=items[0].batch.forward_only)
        return [run.output.finish(run.batch) for run in runs]

    def _only_pack(self, batch: Batch) -> Pack:
        """Return the pack of a batch that is at most one micro-batch; it may have no examples."""
        packs = pack_all(batch, self._max_batch_tokens, self._device, self._pad_to_multiple_of)
        return next(packs, empty_pack(self._device))

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

    def _pass(self, model_id: str, batch: Batch, *, is_forward: bool) -> LossOutput:
        run = _Run(self._models[model_id], batch)
        packs = pack_all(batch, self._max_batch_tokens, self._device, self._pad_to_multiple_of)
        micro_batches = [
            self._division.micro_batch([pack], self._pad_to_multiple_of)
            for pack in with_dummy_packs(list(packs), self._device)
        ]
        if micro_batches:
            self._compute([run], micro_batches, is_forward=is_forward)
        return run.output.finish(batch)

    def _compute(
        self, runs: Sequence[_Run], micro_batches: Sequence[MicroBatch], *, is_forward: bool
    ) -> None:
        """Compute micro-batches of one model, or one micro-batch of several."""
        self._base.linears.active = _active(runs, micro_batches)
        try:
            with self._memory.measured([run.model for run in runs]):
                self._schedule(runs, micro_batches, is_forward=is_forward)
        finally:
            self._base.linears.active = ()
        for run, expert_tokens_LE in zip(runs, self._router_counts.sums(len(runs)), strict=True):
            if expert_tokens_LE is not None:
                run.output.count(expert_tokens_LE)

    def _schedule(
        self, runs: Sequence[_Run], micro_batches: Sequence[MicroBatch], *, is_forward: bool
    ) -> None:
        # Once for all micro-batches, several of which are in flight in a pipeline.
        replaced, most = self._replaced_weights(runs[0].model), self._max_kept_tokens
        lm_head = self._lm_heads(runs[0].model)

        def step(batches: Iterator[MicroBatch], module: GPTModel) -> tuple[Tensor, Any]:
            micro_batch = next(batches)
            tokens = sum(micro_batch.sequences.lengths)
            self._base.layers.recompute = most is not None and tokens > most
            # Rotary positions and the mask are derived from the sequences.
            given = (micro_batch.ids_S[None], None, None)
            packed = {"packed_seq_params": micro_batch.sequences}
            with self._router_counts.counting(micro_batch):
                result = functional_call(module, replaced, given, packed)
            return result, partial(self._loss, micro_batch, lm_head, runs)

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
        lm_head: Callable[[MicroBatch], LMHead],
        runs: Sequence[_Run],
        hidden_S1D: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Collect the results of a micro-batch; return the scalar that starts its backward pass.

        Called on the last stage. The sum of logprobs times the derivative of the loss has the same
        gradient as the loss; only this gradient matters, and each rank has a part of the sum.
        """
        number = torch.tensor(0, dtype=torch.int, device=hidden_S1D.device)
        if not micro_batch.has_examples:
            # Other ranks wait for the backward pass of the experts of their tokens.
            return hidden_S1D.sum() * 0.0, number, {}
        # Each rank's part of the vocabulary contributes a partial gradient.
        targets_RK, places_M = micro_batch.targets(), micro_batch.places_M
        hidden_S1D = gather_from_sequence_parallel_region(hidden_S1D)
        lp_MK = logprobs(
            lm_head(micro_batch),
            hidden_S1D[:, 0][micro_batch.kept_M],
            targets_RK[places_M],
            parallel_state.get_tensor_model_parallel_group(),
            self.limits.vocab_size,
        )
        lp_RK = lp_MK.new_zeros(targets_RK.shape)
        lp_RK[places_M] = lp_MK.detach()
        dist.all_reduce(lp_RK, group=self._division.group)
        derivative_RK = torch.zeros_like(lp_RK)
        for run, part in zip(runs, micro_batch.parts, strict=True):
            if part.pack.examples:
                own_RK, loss = lp_RK[part.rows], run.batch.loss
                loss_sum, derivative_RK[part.rows] = losses.derivative(
                    loss, own_RK, part.pack.inputs
                )
                run.output.add(part.pack, own_RK, loss_sum)
        return (lp_MK * derivative_RK[places_M]).sum(), number, {}

    def _lm_heads(self, model: TrainedModel) -> Callable[[MicroBatch], LMHead]:
        """Return what gives the LM head of a micro-batch: a full model's own, or the base's.

        Only the last stage has one.
        """
        module = self._base.module
        if isinstance(model.sharding, MegatronShardedModel):
            tensors = model.trainable.tensors
            trained = cache(
                lambda: trained_output_layer(tensors[self._base.lm_head_weight], self._dtype)
            )
            return lambda _: trained()
        frozen = cache(lambda: module.get_parameter(self._base.lm_head_weight))

        def with_adapters(micro_batch: MicroBatch) -> LMHead:
            rows = [part.kept for part in micro_batch.parts]
            adapters = list(zip(rows, self._base.linears.active, strict=True))
            return frozen_output_layer(frozen(), self._base.lm_head, adapters)

        return with_adapters

    def _replaced_weights(self, model: TrainedModel) -> dict[str, Tensor]:
        """Return the replacements of the base's weights, which are none for an adapter."""
        if not isinstance(model.sharding, MegatronShardedModel):
            return {}
        return model.sharding.weights(self._dtype)


def _is_divided(targets: Sequence[adapters.Target]) -> bool:
    """Whether an adapter of these targets is divided over ranks; see `sharded_adapter`."""
    between: dist.ProcessGroup = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return between.size() > 1 and any(target.experts for target in targets)


def _active(runs: Sequence[_Run], micro_batches: Sequence[MicroBatch]) -> list[Active]:
    """Return the adapters of a pass: none for a full model."""
    ranges = [(slice(None), slice(None))]
    if len(runs) > 1:
        (micro_batch,) = micro_batches
        size = len(micro_batch.ids_S) // parallel_state.get_tensor_model_parallel_world_size()
        first = size * parallel_state.get_tensor_model_parallel_rank()
        held = [part.held for part in micro_batch.parts]
        ranges = [(each, _overlap(each, first, size)) for each in held]
    return [
        Active(run.model.trainable.tensors, adapters.scale(run.model.lora.rank), inside, between)
        for run, (inside, between) in zip(runs, ranges, strict=True)
        if run.model.lora is not None
    ]


def _overlap(held: slice, first: int, size: int) -> slice:
    """Return which of the `size` positions from `first` on are in a range; it may be empty."""
    start, stop = (min(max(bound - first, 0), size) for bound in (held.start, held.stop))
    return slice(start, stop)
