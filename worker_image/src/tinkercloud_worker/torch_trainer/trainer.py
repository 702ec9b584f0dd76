"""The torch trainer: LoRA adapters or whole models over one Hugging Face base, in this process.

A request is cut into micro-batches of like lengths, right-padded. The trunk runs under autograd;
the output layer, the loss and their gradient are computed by `unembed` without a graph, and the
trunk's backward pass starts from the gradient of its hidden states. Gradients land in the model's
flat gradient (`engine.parameters`), where they add up until optim_step.

Shape legend: B examples, T positions, N positions of one example, R positions of a micro-batch
that belong to an example, D hidden size, K targets per position.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker import lora, losses
from tinkercloud_worker.adam import AdamTrainer, TrainedModel, new_adapter
from tinkercloud_worker.base_model import ActiveWeights, BaseModel, Route, route_all
from tinkercloud_worker.collate import MicroBatch, PassOutput, collate_all
from tinkercloud_worker.engine.batch import Batch, TokenLimits
from tinkercloud_worker.engine.parameters import Layout, TensorSpec, Trainable
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.torch_trainer.unembed import (
    Derivative,
    Unembedding,
    logprobs,
    logprobs_and_gradient,
)


class TorchTrainer(AdamTrainer):
    """See `engine.trainer.Trainer`, whose contract this class fulfils."""

    def __init__(
        self,
        base: BaseModel,
        *,
        max_batch_tokens: int,
        max_context_length: int | None = None,
        max_kept_tokens: int | None = None,
    ) -> None:
        """Make a trainer without models.

        Args:
            base: the base model.
            max_batch_tokens: padded tokens of a micro-batch; a longer example is one of its own.
            max_context_length: of examples; None means the base model's.
            max_kept_tokens: padded tokens of a micro-batch whose activations are all kept for the
                backward pass; larger ones are computed again there, layer by layer. None: any.
        """
        super().__init__(
            TokenLimits(
                base.vocab_size, min(max_context_length or 1 << 62, base.max_context_length)
            )
        )
        self._base = base
        self._max_batch_tokens = max_batch_tokens
        self._max_kept_tokens = max_kept_tokens

    def _new_model(self, lora_config: LoraConfig | None) -> TrainedModel:
        if lora_config is None:
            return self._full_model()
        if lora_config.train_mlp and self._base.has_fused_experts:
            raise InvalidRequest(
                "train_mlp: this model keeps its experts in fused tensors, which the torch trainer"
                " can't adapt; set train_mlp to false"
            )
        return new_adapter(self._base.targets, lora_config, self._base.device)

    def _full_model(self) -> TrainedModel:
        weights = self._base.named_weights()
        layout = Layout(TensorSpec(name, tuple(w.shape)) for name, w in weights.items())
        trainable = Trainable(layout, self._base.device)
        layout.fill(trainable.flat.detach(), weights, "base model")
        return TrainedModel(None, trainable)

    def forward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> LossOutput:
        """See `Trainer.forward`."""
        model = self._models[model_id]
        loss = losses.find(batch.loss_fn)
        output = PassOutput(len(batch.examples))
        for micro_batch in collate_all(batch, self._max_batch_tokens, self._base.device):
            with torch.no_grad():
                hidden_RD = self._hidden(model, micro_batch.ids_BT)[micro_batch.valid_BT]
            lp_RK = logprobs(self._unembedding(model), hidden_RD, micro_batch.targets_RK)
            loss_sum, _ = losses.derivative(loss, lp_RK, micro_batch.inputs)
            output.add(micro_batch, lp_RK, float(loss_sum))
            between()
        return output.finish(batch)

    def forward_backward(
        self, model_id: str, batch: Batch, between: Callable[[], None]
    ) -> LossOutput:
        """See `Trainer.forward_backward`."""
        model = self._models[model_id]
        output = PassOutput(len(batch.examples))
        for micro_batch in collate_all(batch, self._max_batch_tokens, self._base.device):
            hidden_BTD = self._hidden(model, micro_batch.ids_BT)
            lp_RK, loss_sum, gradient_RD = self._unembed(
                model, micro_batch, hidden_BTD.detach()[micro_batch.valid_BT], batch.loss_fn
            )
            if self._needs_backward(hidden_BTD, gradient_RD):
                gradient_BTD = torch.zeros_like(hidden_BTD)
                gradient_BTD[micro_batch.valid_BT] = gradient_RD
                hidden_BTD.backward(gradient_BTD)
            output.add(micro_batch, lp_RK, loss_sum)
            del hidden_BTD
            between()
        return output.finish(batch)

    def _unembed(
        self, model: TrainedModel, micro_batch: MicroBatch, hidden_RD: Tensor, loss_fn: str
    ) -> tuple[Tensor, float, Tensor]:
        """Return logprobs [R, K], the summed loss and the gradient [R, D] of the hidden states."""
        loss, layer = losses.find(loss_fn), self._unembedding(model)
        inputs, targets_RK = micro_batch.inputs, micro_batch.targets_RK
        sums = []

        def token_local(rows: slice, lp_RK: Tensor) -> Tensor:
            loss_sum, gradient_RK = losses.derivative(loss, lp_RK, inputs.rows(rows))
            sums.append(float(loss_sum))
            return gradient_RK

        derivative: Derivative = token_local
        if not loss.is_token_local:
            # The derivative at one token needs every logprob of its sequence: compute those first.
            lp_RK = logprobs(layer, hidden_RD, targets_RK)
            loss_sum, whole_RK = losses.derivative(loss, lp_RK, inputs)
            sums.append(float(loss_sum))

            def derivative(rows: slice, _lp_RK: Tensor) -> Tensor:
                return whole_RK[rows]

        lp_RK, gradient_RD = logprobs_and_gradient(layer, hidden_RD, targets_RK, derivative)
        return lp_RK, sum(sums), gradient_RD

    def _needs_backward(self, hidden_BTD: Tensor, gradient_RD: Tensor) -> bool:
        """Whether the trunk's backward pass has anything to add to a gradient."""
        return hidden_BTD.requires_grad and bool(gradient_RD.any())

    def _hidden(self, model: TrainedModel, ids_BT: Tensor) -> Tensor:
        most = self._max_kept_tokens
        recompute = most is not None and ids_BT.numel() > most
        return self._base.hidden(ids_BT, _route(model), recompute=recompute)

    def _unembedding(self, model: TrainedModel) -> Unembedding:
        adapters = self._base.head_adapters(_route(model))
        replaced = None if model.lora else model.trainable.tensors
        return Unembedding(self._base.head(replaced), adapters[0][1:] if adapters else None)


def _route(model: TrainedModel) -> list[Route]:
    scale = lora.scale(model.lora.rank) if model.lora else None
    return route_all(ActiveWeights(model.trainable.tensors, scale))
