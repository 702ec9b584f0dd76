"""The torch trainer: LoRA adapters or whole models over one Hugging Face base, in this process.

A request is cut into micro-batches of like lengths, right-padded. The trunk runs under autograd;
the output layer, the loss and their gradient are computed by `unembed` without a graph, and the
trunk's backward pass starts from the gradient of its hidden states. Gradients land in the model's
flat gradient (`engine.parameters`), where they add up until optim_step.

Shape legend: B examples, T positions, N positions of one example, R positions of a micro-batch
that belong to an example, D hidden size, K targets per position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.payloads import FloatArray
from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_worker import lora, losses
from tinkercloud_worker.base_model import ActiveWeights, BaseModel, Route
from tinkercloud_worker.engine.batch import (
    Batch,
    Example,
    ScalarT,
    TokenLimits,
    micro_batches,
)
from tinkercloud_worker.engine.parameters import Layout, TensorSpec, Trainable
from tinkercloud_worker.engine.trainer import (
    Gradient,
    LossOutput,
    TrainingState,
    WeightsSnapshot,
)
from tinkercloud_worker.losses import LossInputs
from tinkercloud_worker.torch_trainer.unembed import (
    Derivative,
    Unembedding,
    logprobs,
    logprobs_and_gradient,
)


@dataclass(slots=True, eq=False)
class _Model:
    """One model under training."""

    lora: LoraConfig | None
    trainable: Trainable
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW([self.trainable.flat], lr=0.0, fused=True)

    @property
    def weights(self) -> ActiveWeights:
        scale = lora.scale(self.lora.rank) if self.lora else None
        return ActiveWeights(self.trainable.tensors, scale)


@dataclass(frozen=True, slots=True, eq=False)
class _MicroBatch:
    """Examples that run together, and where their positions lie in the padded batch."""

    ids_BT: Tensor
    valid_BT: Tensor
    targets_RK: Tensor
    inputs: LossInputs
    examples: Sequence[tuple[int, Example]]
    """With their index in the request."""

    def split(self, values_RK: Tensor) -> list[tuple[int, FloatArray]]:
        """Cut per-position values into per-example arrays in the client's shape."""
        array = values_RK.numpy()
        parts, start = [], 0
        for index, example in self.examples:
            stop, width = start + len(example.tokens), example.targets.shape[1]
            part = array[start:stop, :width]
            parts.append((index, part[:, 0] if example.is_flat else part))
            start = stop
        return parts


class TorchTrainer:
    """See `engine.trainer.Trainer`, whose contract this class fulfils."""

    def __init__(
        self, base: BaseModel, *, max_batch_tokens: int, max_context_length: int | None = None
    ) -> None:
        self._base = base
        self._max_batch_tokens = max_batch_tokens
        self._models: dict[str, _Model] = {}
        self.limits = TokenLimits(
            base.vocab_size, min(max_context_length or 1 << 62, base.max_context_length)
        )

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`."""
        if lora_config is None:
            self._models[model_id] = self._full_model()
            return
        if lora_config.train_mlp and self._base.has_fused_experts:
            raise InvalidRequest(
                "train_mlp: this model keeps its experts in fused tensors, which the torch trainer"
                " can't adapt; set train_mlp to false"
            )
        targets = lora.select(self._base.targets, lora_config)
        trainable = Trainable(lora.layout(targets, lora_config.rank))
        seed = lora_config.seed if lora_config.seed is not None else torch.seed()
        lora.initialize(trainable.tensors, targets, seed)
        self._models[model_id] = _Model(lora_config, trainable)

    def _full_model(self) -> _Model:
        weights = self._base.named_weights()
        layout = Layout(TensorSpec(name, tuple(w.shape)) for name, w in weights.items())
        trainable = Trainable(layout)
        layout.fill(trainable.flat.detach(), weights, "base model")
        return _Model(None, trainable)

    def remove_model(self, model_id: str) -> None:
        """See `Trainer.remove_model`."""
        self._models.pop(model_id, None)

    def forward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> LossOutput:
        """See `Trainer.forward`."""
        model = self._models[model_id]
        loss = losses.find(batch.loss_fn)
        output = _Output(len(batch.examples))
        for micro_batch in self._micro_batches(batch):
            with torch.no_grad():
                hidden_RD = self._hidden(model, micro_batch)[micro_batch.valid_BT]
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
        output = _Output(len(batch.examples))
        for micro_batch in self._micro_batches(batch):
            hidden_BTD = self._hidden(model, micro_batch)
            lp_RK, loss_sum, gradient_RD = self._unembed(
                model, micro_batch, hidden_BTD.detach()[micro_batch.valid_BT], batch.loss_fn
            )
            if hidden_BTD.requires_grad and gradient_RD.any():
                gradient_BTD = torch.zeros_like(hidden_BTD)
                gradient_BTD[micro_batch.valid_BT] = gradient_RD
                hidden_BTD.backward(gradient_BTD)
            output.add(micro_batch, lp_RK, loss_sum)
            del hidden_BTD
            between()
        return output.finish(batch)

    def _unembed(
        self, model: _Model, micro_batch: _MicroBatch, hidden_RD: Tensor, loss_fn: str
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

    def _hidden(self, model: _Model, micro_batch: _MicroBatch) -> Tensor:
        return self._base.hidden(micro_batch.ids_BT, [Route(slice(None), model.weights)])

    def _unembedding(self, model: _Model) -> Unembedding:
        route = Route(slice(None), model.weights)
        adapters = self._base.head_adapters([route])
        replaced = None if model.lora else model.trainable.tensors
        return Unembedding(self._base.head(replaced), adapters[0][1:] if adapters else None)

    def _micro_batches(self, batch: Batch) -> Sequence[_MicroBatch]:
        lengths = [len(example.tokens) for example in batch.examples]
        return [
            _collate([(index, batch.examples[index]) for index in group])
            for group in micro_batches(lengths, self._max_batch_tokens)
        ]

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `Trainer.optim_step`."""
        model = self._models[model_id]
        gradient = model.trainable.gradient
        norm = float(torch.linalg.vector_norm(gradient))
        if not np.isfinite(norm):
            gradient.zero_()
            raise InvalidRequest(
                "the accumulated gradient holds a NaN or an infinity; it was dropped and the"
                " weights are unchanged. Check learning_rate, advantages and logprobs"
            )
        if params.grad_clip_norm and norm > params.grad_clip_norm:
            gradient.mul_(params.grad_clip_norm / norm)
        (group,) = model.optimizer.param_groups
        group.update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        model.optimizer.step()
        gradient.zero_()
        return {"grad_norm": norm, "step": float(_step(model))}

    def discard_gradient(self, model_id: str) -> None:
        """See `Trainer.discard_gradient`."""
        self._models[model_id].trainable.gradient.zero_()

    def snapshot(self, model_id: str) -> WeightsSnapshot:
        """See `Trainer.snapshot`."""
        model = self._models[model_id]
        trainable = model.trainable
        return WeightsSnapshot(model.lora, trainable.layout.views(trainable.snapshot()))

    def export_state(self, model_id: str) -> TrainingState:
        """See `Trainer.export_state`."""
        model = self._models[model_id]
        state, layout = model.optimizer.state[model.trainable.flat], model.trainable.layout
        moments: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            flat = state[moment].clone() if state else torch.zeros(layout.size)
            moments |= {f"{name}.{moment}": view for name, view in layout.views(flat).items()}
        return TrainingState(self.snapshot(model_id), moments, _step(model))

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """See `Trainer.import_state`."""
        model = self._models[model_id]
        layout, flat = model.trainable.layout, model.trainable.flat
        fresh = torch.empty(layout.size)
        layout.fill(fresh, state.weights.tensors, "checkpoint")
        moments: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq") if state.moments is not None else ():
            moments[moment] = torch.empty(layout.size)
            layout.fill(moments[moment], _moment(state.moments, moment), "optimizer state")
        flat.detach().copy_(fresh)
        model.trainable.gradient.zero_()
        model.reset_optimizer()
        if moments and state.step:
            step = torch.tensor(float(state.step))
            model.optimizer.state[flat] = {"step": step, **moments}

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`."""
        trainable = self._models[model_id].trainable
        if not trainable.gradient.any():
            return None
        return trainable.layout.views(trainable.gradient.clone())

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`."""
        trainable = self._models[model_id].trainable
        trainable.layout.fill(trainable.gradient, gradient, "gradient")


def _moment(moments: Mapping[str, Tensor] | None, moment: str) -> dict[str, Tensor]:
    suffix = f".{moment}"
    return {
        name.removesuffix(suffix): tensor
        for name, tensor in (moments or {}).items()
        if name.endswith(suffix)
    }


def _step(model: _Model) -> int:
    state = model.optimizer.state[model.trainable.flat]
    return int(state["step"]) if state else 0


class _Output:
    """Collects the results of micro-batches in the request's order."""

    def __init__(self, num_examples: int) -> None:
        self._logprobs: list[FloatArray | None] = [None] * num_examples
        self._losses: list[float] = []

    def add(self, micro_batch: _MicroBatch, lp_RK: Tensor, loss_sum: float) -> None:
        for index, part in micro_batch.split(lp_RK):
            self._logprobs[index] = part
        self._losses.append(loss_sum)

    def finish(self, batch: Batch) -> LossOutput:
        logprobs = [part for part in self._logprobs if part is not None]
        metrics = {"loss:sum": sum(self._losses), "tokens:sum": float(batch.num_tokens)}
        return LossOutput(logprobs, metrics)


def _collate(examples: Sequence[tuple[int, Example]]) -> _MicroBatch:
    """Right-pad examples into one batch, and lay their positions one after another."""
    lengths = torch.tensor([len(example.tokens) for _, example in examples])
    ids_BT = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    for row, (_, example) in enumerate(examples):
        ids_BT[row, : len(example.tokens)] = torch.from_numpy(example.tokens.astype(np.int64))
    width = max(example.targets.shape[1] for _, example in examples)
    names = examples[0][1].inputs
    return _MicroBatch(
        ids_BT=ids_BT,
        valid_BT=torch.arange(ids_BT.shape[1]) < lengths.unsqueeze(1),
        targets_RK=_stack([example.targets for _, example in examples], width),
        inputs=LossInputs(
            {
                name: _stack([example.inputs[name] for _, example in examples], width)
                for name in names
            },
            datum_of_row=torch.repeat_interleave(torch.arange(len(examples)), lengths),
            num_data=len(examples),
        ),
        examples=examples,
    )


def _stack(arrays: Sequence[npt.NDArray[ScalarT]], width: int) -> Tensor:
    """Concatenate [N, K] arrays along N; narrower ones get columns of zeros, which weigh 0."""
    padded = [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays]
    return torch.from_numpy(np.concatenate(padded))
