"""The LM head alone: from hidden states to logprobs and their gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.shared.measuring import Measurement
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.logprobs import logprobs_and_gradient


class Head:
    """An LM head, computed by the trainer or by plain torch."""

    def __init__(self, bench: Bench) -> None:
        positions, hidden_size, vocab_size = bench.work.head
        torch.manual_seed(0)
        device, dtype = bench.device, bench.dtype
        self.weight = torch.randn(vocab_size, hidden_size).to(device, dtype) / hidden_size**0.5
        self.hidden = torch.randn(positions, hidden_size).to(device, dtype)
        self.targets = torch.randint(0, vocab_size, (positions, 1)).to(device)

    def ours(self) -> Tensor:
        """Return the gradient of the hidden states, as the trainer computes it."""
        layer = LMHead(FrozenLinear(self.weight, None), ())
        _, gradient = logprobs_and_gradient(
            layer, self.hidden, self.targets, lambda _, lp: torch.full_like(lp, -1.0)
        )
        return gradient

    def eager(self, weight: Tensor) -> Tensor:
        """Return the same from full logits, and the weight's gradient if it is trained."""
        hidden = self.hidden.detach().requires_grad_()
        logits = (hidden @ weight.T).float()
        loss = torch.nn.functional.cross_entropy(logits, self.targets[:, 0], reduction="sum")
        torch.autograd.backward(loss)
        weight.grad = None
        assert hidden.grad is not None
        return hidden.grad


def gradient(bench: Bench) -> Iterator[Measurement]:
    """N1: the trainer's gradient equals the plain one within bfloat16 accuracy."""
    head = Head(bench)
    ours, eager = head.ours().float(), head.eager(head.weight).float()
    error = float((ours - eager).norm() / eager.norm())
    yield Measurement(
        "N1", "output layer: gradient / whole logits', bfloat16", error, "", "<= 0.02"
    )


def memory(bench: Bench) -> Iterator[Measurement]:
    """G6: memory of the LM head in addition to hidden states and their gradient."""
    head = Head(bench)
    peak, gradient = bench.peak_bytes(head.ours)
    gib = (peak - gradient.nbytes) / (1 << 30)
    whole, _ = bench.peak_bytes(lambda: head.eager(head.weight))
    note = f"whole logits {whole / (1 << 30):.1f} GiB"
    yield Measurement("G6", "memory of the output layer", gib, "GiB", "<= 0.7", "<= 0.1", note)


def speed(bench: Bench) -> Iterator[Measurement]:
    """G7: time of the LM head against full logits, with and without the weight's gradient."""
    head = Head(bench)
    trained = head.weight.clone().requires_grad_()
    ours, eager, frozen = bench.seconds(
        head.ours, lambda: head.eager(trained), lambda: head.eager(head.weight)
    )
    note = f"{1e3 * ours:.1f} ms; {ours / frozen:.2f} x whole logits over a frozen weight"
    yield Measurement(
        "G7", "output layer / whole logits and trained weight", ours / eager, "x",
        "<= 1.3", "<= 1.0", note,
    )  # fmt: skip
