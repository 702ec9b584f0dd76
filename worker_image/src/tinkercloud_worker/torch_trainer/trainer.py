"""The torch trainer: LoRA or full fine-tuning over one Hugging Face base, in this process.

A request is split into packs of full sequences; small requests of several models can share a pack.
The backbone runs under autograd; the LM head, the loss and their gradient are computed without a
graph (`logprobs`), and the backbone's backward pass starts from the gradient of its hidden states.
Gradients accumulate in each model's flat gradient (`lora.parameters`) until optim_step.

Shape legend: R positions of a pack, D hidden size, K targets per position.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import losses
from tinkercloud_worker.custom_losses.uploaded import LossIsComputing
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import Batch, ModelLimits, capped_context_length
from tinkercloud_worker.engine.memory_report import BYTES_PER_PARAMETER
from tinkercloud_worker.engine.trainer import LossOutput, Trainer, TrainingPass, WeightsCopy
from tinkercloud_worker.engine.turns.engine_thread import (
    Batcher,
    Pause,
    PieceLimit,
    Pieces,
    run_through,
)
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.parameters import (
    TensorLayout,
    Trainable,
    gradient_of,
    unchanged_if_it_fails,
)
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.logprobs import (
    Derivative,
    logprobs,
    logprobs_and_gradient,
)
from tinkercloud_worker.training.adam import AdamTrainer
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.packing import Pack, PassOutput, pack_all, split
from tinkercloud_worker.training.trained_model import TrainedModel, new_adapter

ModelSegments = Sequence[tuple[slice, TrainedModel]]
"""Consecutive positions of a pass, each with the model it belongs to."""

Compute = Callable[
    [Sequence[tuple[TrainedModel, Pack]], Sequence[losses.Loss]],
    list[tuple[Tensor, Tensor, Tensor | None]],
]
"""Runs packs of models with their losses; returns the arguments of `PassOutput.add` for each."""


def _no_limit() -> None:
    """Let a piece have as many tokens as a micro-batch."""


class TorchTrainer(AdamTrainer, Trainer):
    """Implements `engine.trainer.Trainer` on one device."""

    def __init__(
        self,
        base: TorchBaseModel,
        *,
        max_batch_tokens: int,
        max_shared_tokens: int | None = None,
        max_context_length: int | None = None,
        max_kept_tokens: int | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Create a trainer without models.

        Args:
            base: the base model.
            max_batch_tokens: maximum tokens of a micro-batch; a longer example gets its own.
            max_shared_tokens: maximum tokens of a micro-batch that several models share; None: as
                any other, 0: none share one.
            max_context_length: maximum tokens of an example; None means the base model's.
            max_kept_tokens: activation checkpointing threshold: micro-batches with more tokens are
                recomputed layer by layer in the backward pass. None: never recompute.
            memory: the memory of the models' device, which decides whether a new model is
                admitted; None: it is not limited.
        """
        longest = capped_context_length(max_context_length, base.max_context_length)
        super().__init__(ModelLimits(base.vocab_size, longest), base.dtype, memory)
        self._base = base
        self._memory.rank_bytes = adapters.layout(base.targets, 1).size * BYTES_PER_PARAMETER
        self.base_fingerprint = base.fingerprint
        self.reads_images = base.images.are_read
        self._max_batch_tokens = max_batch_tokens
        self._max_shared_tokens = min(
            max_batch_tokens, max_batch_tokens if max_shared_tokens is None else max_shared_tokens
        )
        self._max_kept_tokens = max_kept_tokens
        # Known before the first model, so that no more runs come than there is memory for.
        self._memory.determine()

    def _new_model(self, lora_config: LoraConfig | None) -> TrainedModel:
        if lora_config is None:
            self._check_whole()
            return self._full_model()
        kind = f"an adapter of rank {lora_config.rank}"
        self._memory.check(self._adapter_layout(lora_config), kind, "a smaller rank")
        return new_adapter(self._base.targets, lora_config, self._base.device)

    def _adapter_layout(self, lora_config: LoraConfig) -> TensorLayout:
        """Return the tensors of an adapter.

        Raises:
            InvalidRequest: there can be no such adapter.
        """
        experts = self._base.unadaptable_experts
        if lora_config.train_mlp and experts:
            raise InvalidRequest(
                f"train_mlp: true is not supported: the torch trainer can't adapt experts of class"
                f" {experts}; set train_mlp to false"
            )
        return adapters.layout(adapters.select(self._base.targets, lora_config), lora_config.rank)

    def _check_whole(self) -> None:
        """Check that full fine-tuning computes the same outputs as the base, and correct gradients.

        Raises:
            InvalidRequest: it does not.
        """
        experts = self._base.unadaptable_experts
        if experts:
            # transformers computes these, with the product that `guard_gradients` protects against.
            raise InvalidRequest(
                f"lora_config: full fine-tuning is not supported: the torch trainer can't train"
                f" experts of class {experts}; set a LoRA rank, and train_mlp to false"
            )
        for name, weight in self._base.named_weights().items():
            if weight.dtype != self._base.dtype:
                raise InvalidRequest(
                    f"lora_config: full fine-tuning needs all weights in {self._base.dtype}, but"
                    f" the base has {name} in {weight.dtype}; set a LoRA rank instead"
                )

    def _full_model(self) -> TrainedModel:
        weights = self._base.named_weights()
        layout = TensorLayout.of(weights)
        self._memory.check(layout, "a fully fine-tuned model", "a LoRA rank (lora_config)")
        trainable = Trainable(layout, self._base.device)
        layout.fill(trainable.flat.detach(), weights, "base model")
        return TrainedModel(None, trainable)

    def forward(self, model_id: str, batch: Batch) -> LossOutput:
        """See `DirectTrainer.forward`."""
        return run_through(self._pieces(model_id, batch, self._evaluate), lambda: None)

    def forward_backward(self, model_id: str, batch: Batch) -> LossOutput:
        """See `DirectTrainer.forward_backward`."""
        return run_through(self._pieces(model_id, batch, self._run), lambda: None)

    def pieces(self, item: TrainingPass, limit: PieceLimit) -> Pieces[LossOutput]:
        """See `engine.thread.Batcher`: a pass in micro-batches.

        Between two of them no autograd graph exists, and only the gradient of its own model has
        changed.
        """
        compute = self._evaluate if item.batch.forward_only else self._run
        may_differ = self._max_shared_tokens > 0
        return self._pieces(item.model_id, item.batch, compute, limit if may_differ else _no_limit)

    def _pieces(
        self, model_id: str, batch: Batch, compute: Compute, limit: PieceLimit = _no_limit
    ) -> Pieces[LossOutput]:
        output = PassOutput()
        before = 0
        for pack in self._limited(self._packs(batch), limit):
            if before:
                yield before
            results = yield from self._computed(model_id, batch, compute, pack)
            output.add(pack, *results)
            before = len(pack.sequences.ids_R)
        return output.finish(batch)

    def _computed(
        self, model_id: str, batch: Batch, compute: Compute, pack: Pack
    ) -> Pieces[tuple[Tensor, Tensor, Tensor | None]]:
        """Run a pack; a custom loss that takes long is waited for without its activations."""
        while True:
            try:
                # Looked up each time: meanwhile the model may be paged out.
                (results,) = compute([(self._models[model_id], pack)], [batch.loss])
            except LossIsComputing as error:
                pause = Pause(error.done, len(pack.sequences.ids_R))
            else:
                return results
            yield pause

    @property
    def batcher(self) -> Batcher[TrainingPass, LossOutput]:
        """See `Trainer.batcher`."""
        return self

    def can_batch(self, items: Sequence[TrainingPass], item: TrainingPass) -> bool:
        """See `engine.thread.Batcher`: adapters share a pass that is one micro-batch in all.

        Their losses may differ.
        """
        everyone = [*items, item]
        tokens = sum(each.batch.num_tokens for each in everyone)
        kinds = {(each.batch.forward_only, each.batch.num_targets) for each in everyone}
        return (
            self._base.takes_packs
            and self._models.is_paged_in(item.model_id)
            and tokens <= self._max_shared_tokens
            and len(kinds) == 1
            and all(each.batch.loss.is_token_local for each in everyone)
            and len({each.model_id for each in everyone}) == len(everyone)
            and all(self._is_adapter(each.model_id) for each in everyone)
        )

    def run_batch(
        self, items: Sequence[TrainingPass], yield_point: Callable[[], None]
    ) -> list[LossOutput]:
        """See `engine.thread.Batcher`: what each asks for, in one pass."""
        models = self._models.together([item.model_id for item in items])
        if items[0].batch.forward_only:
            outputs = self._in_one_pass(items, models, self._evaluate)
        else:
            with unchanged_if_it_fails([model.trainable.gradient for model in models]):
                outputs = self._in_one_pass(items, models, self._run)
        yield_point()
        return outputs

    def _in_one_pass(
        self, items: Sequence[TrainingPass], models: Sequence[TrainedModel], compute: Compute
    ) -> list[LossOutput]:
        packs = [pack for item in items for pack in self._packs(item.batch)]
        results = compute(
            list(zip(models, packs, strict=True)), [item.batch.loss for item in items]
        )
        outputs = []
        for item, pack, of_pack in zip(items, packs, results, strict=True):
            output = PassOutput()
            output.add(pack, *of_pack)
            outputs.append(output.finish(item.batch))
        return outputs

    def _is_adapter(self, model_id: str) -> bool:
        # A model removed while its pass was queued fails alone, when the pass runs.
        model = self._models.get(model_id)
        return model is not None and model.lora is not None

    def _packs(self, batch: Batch) -> Iterator[Pack]:
        most = self._max_batch_tokens if self._base.takes_packs else 1
        return pack_all(batch, most, self._base.device)

    def _limited(self, packs: Iterator[Pack], limit: PieceLimit) -> Iterator[Pack]:
        """Yield packs, in smaller parts whenever the limit asks for it."""
        least = accelerator.efficient_tokens(self._base.device)
        for whole in packs:
            left = deque([whole])
            while left:
                pack, most = left.popleft(), limit()
                if most is not None and len(pack.sequences.ids_R) > max(most, least):
                    pack, *rest = split(pack, max(most, least), self._base.device)
                    left.extendleft(reversed(rest))
                yield pack

    def _evaluate(
        self, shares: Sequence[tuple[TrainedModel, Pack]], own_losses: Sequence[losses.Loss]
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Compute logprobs and losses of packs; return the arguments of `add` for each."""
        sequences = PackedSequences.joined([pack.sequences for _, pack in shares])
        model_segments = _in_order([(model, pack.sequences) for model, pack in shares])
        with torch.no_grad():
            hidden_RD, expert_tokens = self._counted_hidden(model_segments, sequences)
        targets_RK = torch.cat([pack.targets_RK for _, pack in shares])
        lp_RK = logprobs(self._lm_head_layer(model_segments), hidden_RD, targets_RK)
        results = []
        for (rows, _), (_, pack), loss, expert_tokens_LE in zip(
            model_segments, shares, own_losses, expert_tokens, strict=True
        ):
            loss_sum, _ = losses.derivative(loss, lp_RK[rows], pack.inputs)
            results.append((lp_RK[rows], loss_sum, expert_tokens_LE))
        return results

    def _run(
        self, shares: Sequence[tuple[TrainedModel, Pack]], own_losses: Sequence[losses.Loss]
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Accumulate the gradients of packs; return the arguments of `add` for each."""
        with self._memory.measured([model for model, _ in shares]):
            return self._accumulate(shares, own_losses)

    def _accumulate(
        self, shares: Sequence[tuple[TrainedModel, Pack]], own_losses: Sequence[losses.Loss]
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        sequences = PackedSequences.joined([pack.sequences for _, pack in shares])
        model_segments = _in_order([(model, pack.sequences) for model, pack in shares])
        hidden_RD, expert_tokens = self._counted_hidden(model_segments, sequences)
        parts = [(rows, pack) for (rows, _), (_, pack) in zip(model_segments, shares, strict=True)]
        lp_RK, sums, gradient_RD = _losses_and_gradient(
            self._lm_head_layer(model_segments), parts, hidden_RD.detach(), own_losses
        )
        self._backward(model_segments, hidden_RD, gradient_RD)
        return [
            (lp_RK[rows], loss_sum, expert_tokens_LE)
            for (rows, _), loss_sum, expert_tokens_LE in zip(
                parts, sums, expert_tokens, strict=True
            )
        ]

    def _backward(
        self,
        model_segments: ModelSegments,  # noqa: ARG002 - used where ranks shard models
        hidden_RD: Tensor,
        gradient_RD: Tensor,
    ) -> None:
        """Run the backbone's backward pass, if it contributes to a gradient."""
        if hidden_RD.requires_grad and (
            accelerator.syncs_on_read(gradient_RD) or bool(gradient_RD.any())
        ):
            hidden_RD.backward(gradient_RD)

    def _counted_hidden(
        self, model_segments: ModelSegments, sequences: PackedSequences
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the final hidden states [R, D], and the expert token counts of each model."""
        with self._base.router_counts.counting([rows for rows, _ in model_segments]) as counts:
            hidden_RD = self._hidden(model_segments, sequences)
        return hidden_RD, counts

    def _hidden(self, model_segments: ModelSegments, sequences: PackedSequences) -> Tensor:
        most = self._max_kept_tokens
        recompute = most is not None and len(sequences.ids_R) > most
        return self._base.hidden_of(
            sequences, _weight_segments(model_segments), recompute=recompute
        )

    def _lm_head_layer(self, model_segments: ModelSegments) -> LMHead:
        (_, model), *_ = model_segments
        if model.lora:
            return LMHead(
                self._base.frozen_lm_head,
                self._base.lm_head_adapters(_weight_segments(model_segments)),
                cap=self._base.logits_cap,
            )
        tensors = model.trainable.tensors
        weight, bias = self._base.lm_head_of(tensors)
        gradients = gradient_of(weight), None if bias is None else gradient_of(bias)
        return LMHead(self._base.lm_head(tensors), (), gradients, self._base.logits_cap)


class TorchTrainerWithSampler(TorchTrainer):
    """A trainer that publishes weights to a sampler in the same process, on the same device.

    Weights stay on the device: an adapter is not copied through host memory.
    """

    @override
    def published(self, model_id: str) -> WeightsCopy:
        model, (weights, *_) = self._models.contents(model_id)
        flat = weights.to(self._base.device, self._published_dtype(model), copy=True)
        return WeightsCopy(model.lora, model.trainable.layout.views(flat))


def _in_order(packs: Sequence[tuple[TrainedModel, PackedSequences]]) -> ModelSegments:
    """Return the consecutive positions of packs, each with its model."""
    ends = list(accumulate((len(pack.ids_R) for _, pack in packs), initial=0))
    return [
        (slice(start, stop), model)
        for (start, stop), (model, _) in zip(pairwise(ends), packs, strict=True)
    ]


def _weight_segments(model_segments: ModelSegments) -> list[WeightSegment]:
    return [
        WeightSegment(
            rows,
            ActiveWeights(
                model.trainable.tensors,
                adapters.scale(model.lora.rank) if model.lora else None,
                model.trainable,
            ),
        )
        for rows, model in model_segments
    ]


def _losses_and_gradient(
    layer: LMHead,
    parts: Sequence[tuple[slice, Pack]],
    hidden_RD: Tensor,
    of_parts: Sequence[losses.Loss],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return logprobs [R, K], each part's loss, and the gradient [R, D] of the hidden states.

    Several parts may have different losses, all of them local to tokens.
    """
    targets_RK = torch.cat([positions.targets_RK for _, positions in parts])
    sums: list[list[Tensor]] = [[] for _ in parts]

    def token_local(rows: slice, lp_RK: Tensor) -> Tensor:
        gradients = []
        for part_sums, (own, positions), loss in zip(sums, parts, of_parts, strict=True):
            start, stop = max(own.start, rows.start), min(own.stop, rows.stop)
            if start < stop:
                inputs = positions.inputs.rows(slice(start - own.start, stop - own.start))
                own_lp_RK = lp_RK[start - rows.start : stop - rows.start]
                loss_sum, gradient_RK = losses.derivative(loss, own_lp_RK, inputs)
                part_sums.append(loss_sum)
                gradients.append(gradient_RK)
        return torch.cat(gradients)

    derivative: Derivative = token_local
    if not all(loss.is_token_local for loss in of_parts):
        # The derivative at one token needs all logprobs of its sequence, so compute those first.
        ((_, positions),), (loss,) = parts, of_parts
        lp_RK = logprobs(layer, hidden_RD, targets_RK)
        loss_sum, whole_RK = losses.derivative(loss, lp_RK, positions.inputs)
        sums[0].append(loss_sum)

        def derivative(rows: slice, _lp_RK: Tensor) -> Tensor:
            return whole_RK[rows]

    lp_RK, gradient_RD = logprobs_and_gradient(layer, hidden_RD, targets_RK, derivative)
    return lp_RK, [torch.stack(part_sums).sum() for part_sums in sums], gradient_RD
