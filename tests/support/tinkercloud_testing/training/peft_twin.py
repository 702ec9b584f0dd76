"""The reference for trainers: a transformers model, a PEFT adapter and torch's AdamW."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import peft
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.lora import adapters

Formula = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""Maps the logprobs [N] of a datum's targets, and its inputs, to the terms [N] of its loss."""


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a datum's terms of the weighted cross-entropy: float32 [N]."""
    return -logprobs * inputs["weights"]


class PeftTwin:
    """A PEFT model with the same base and the same adapter as a trainer's.

    Each sequence is computed separately. Only the values and names of the adapter are ours.
    """

    def __init__(self, base: PreTrainedModel, adapter: WeightsCopy) -> None:
        """Start with an adapter.

        Args:
            base: a model, which becomes the twin's.
            adapter: an adapter of dense layers.
        """
        if adapter.lora is None:
            raise ValueError("the weights are those of a full model; a twin needs an adapter")
        modules = {n.removesuffix(".lora_A.weight") for n in adapter.tensors if "lora_A" in n}
        config = peft.LoraConfig(
            r=adapter.lora.rank, lora_alpha=32, target_modules=sorted(modules), lora_dropout=0.0
        )
        self.model = peft.get_peft_model(base, config).eval()
        peft.set_peft_model_state_dict(self.model, adapters.to_peft_names(adapter.tensors))
        self._optimizer = torch.optim.AdamW(self.parameters().values())

    def logprobs(self, data: Sequence[Datum]) -> list[npt.NDArray[np.float32]]:
        """Return the logprobs of each datum's targets, [N] each."""
        return [self._logprobs(datum).detach().numpy() for datum in data]

    def backward(self, data: Sequence[Datum], formula: Formula = cross_entropy) -> float:
        """Add the gradient of a batch to the adapter's, and return the batch's loss."""
        losses = [formula(self._logprobs(each), _inputs(each)).sum() for each in data]
        total = torch.stack(losses).sum()
        total.backward()
        return float(total.detach())

    def optim_step(self, params: AdamParams) -> None:
        """Apply the gradient with torch's own AdamW and clipping, and set it to zero."""
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters().values(), params.grad_clip_norm)
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()

    def steps(self, batches: Iterable[tuple[Sequence[Datum], AdamParams]]) -> list[float]:
        """Take a step with the gradient of each batch, and return the losses before them."""
        losses = []
        for data, params in batches:
            losses.append(self.backward(data))
            self.optim_step(params)
        return losses

    def parameters(self) -> dict[str, Tensor]:
        """Return the adapter's tensors, named as a trainer's."""
        return {
            name.replace(".default", "").removeprefix("base_model.model."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return their accumulated gradients.

        Raises:
            ValueError: one of them has no gradient.
        """
        gradients = {}
        for name, parameter in self.parameters().items():
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient: call backward first")
            gradients[name] = parameter.grad
        return gradients

    def _logprobs(self, datum: Datum) -> Tensor:
        tokens = torch.tensor(datum.tokens[None].astype(np.int64))
        logits = self.model(input_ids=tokens).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])
        return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]


def _inputs(datum: Datum) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in datum.inputs.items()}
