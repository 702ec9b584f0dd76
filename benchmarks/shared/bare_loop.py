"""The plain baseline without a service: padding to the longest sequence, full logits, PEFT."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from tinkercloud_protocol.requests.tensors import Datum


class BareLoop:
    """A plain transformers + PEFT loop over one adapter of a model's linear layers."""

    def __init__(self, model: PreTrainedModel, rank: int) -> None:
        # Imported here, so that other benchmarks run without PEFT.
        import peft  # noqa: PLC0415

        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")
        self.model = peft.get_peft_model(model, config)

    def step(self, data: Sequence[Datum]) -> None:
        """Compute a batch's gradient and discard it."""
        longest = max(len(datum.tokens) for datum in data)
        ids = torch.zeros(len(data), longest, dtype=torch.int64)
        targets = torch.full_like(ids, -100)
        for row, datum in enumerate(data):
            ids[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens.astype(np.int64))
            targets[row, : len(datum.tokens)] = torch.from_numpy(datum.inputs["target_tokens"])
        device = self.model.device
        mask = (targets != -100).long().to(device)
        logits = self.model(input_ids=ids.to(device), attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten().to(device), reduction="sum"
        )
        torch.autograd.backward(loss)
        self.model.zero_grad()
