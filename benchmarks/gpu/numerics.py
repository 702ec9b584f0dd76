"""The engine against a plain Hugging Face model with a merged adapter."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import (
    MODEL,
    a_batch,
    a_prompt,
    a_request,
    a_sampler,
    a_trainer,
    base_of,
    random_data,
    trained_logprobs,
)
from benchmarks.gpu.workloads import Shape, plain_transformers
from benchmarks.shared.measuring import Measurement, largest_error
from tinkercloud_protocol.requests.tensors import Datum, SampledSequence
from tinkercloud_worker.device.accelerator import graph_capturer_for
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LENGTHS = (24, 9, 17)


class Merged:
    """A Hugging Face model with an adapter merged into its weights."""

    def __init__(
        self,
        bench: Bench,
        shape: Shape,
        base: TorchBaseModel,
        trainer: TorchTrainer,
        dtype: torch.dtype,
    ) -> None:
        published = trainer.publication(MODEL)()
        assert published.lora is not None
        self.model: PreTrainedModel = shape.build(bench.device, torch.float32)
        with torch.no_grad():
            for name, weight in base.named_weights().items():
                self.model.get_parameter(name).copy_(weight)
        self.adapter: Mapping[str, Tensor] = published.tensors
        self.scale = adapters.scale(published.lora.rank)
        self.names = sorted({name.rpartition(".lora_")[0] for name in self.adapter})
        head = self.model.get_submodule("lm_head")
        # It is tied to the input embedding, which has no adapter.
        head.weight = nn.Parameter(_weight(head).detach().clone())
        with torch.no_grad():
            for name in self.names:
                a, b = self.halves(name)
                _own(self._weight(name), name).add_(b @ a, alpha=self.scale)
        nn.Module.to(self.model, dtype)

    def halves(self, name: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a weight."""
        return self.adapter[f"{name}.lora_A.weight"], self.adapter[f"{name}.lora_B.weight"]

    def logprobs(self, datum: Datum) -> Tensor:
        """Return the logprobs of a datum's targets."""
        device = self.model.device
        ids = torch.from_numpy(datum.tokens.astype(np.int64)).to(device)
        targets = torch.from_numpy(datum.inputs["target_tokens"]).to(device)
        logits = self.model(input_ids=ids[None]).logits[0].float()
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]

    def gradients(self, data: list[Datum]) -> dict[str, Tensor]:
        """Return the gradients of A and B, derived from those of the merged weights."""
        for name in self.names:
            self._weight(name).requires_grad_()
        sum(-self.logprobs(datum).sum() for datum in data).backward()  # type: ignore[union-attr]
        found = {}
        for name in self.names:
            a, b = self.halves(name)
            whole = self._weight(name).grad
            assert whole is not None
            gradient = _own(whole, name)
            # A shared half has the sum of the experts' gradients.
            found[f"{name}.lora_A.weight"] = (self.scale * b.mT @ gradient).sum_to_size(a.shape)
            found[f"{name}.lora_B.weight"] = (self.scale * gradient @ a.mT).sum_to_size(b.shape)
        return found

    def _weight(self, name: str) -> Tensor:
        """Return the weight that an adapter modifies: a layer's own, or one stacked for all
        experts."""
        before, _, leaf = name.rpartition(".")
        if before.endswith(".experts"):
            fused = "down_proj" if leaf == "down_proj" else "gate_up_proj"
            return self.model.get_parameter(f"{before}.{fused}")
        return _weight(self.model.get_submodule(name))


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _own(weight: Tensor, name: str) -> Tensor:
    """Return the part of a weight, or of its gradient, that an adapter covers."""
    if not name.endswith((".experts.gate_proj", ".experts.up_proj")):
        return weight
    gate, up = weight.chunk(2, -2)
    return up if name.endswith("up_proj") else gate


def float32(bench: Bench) -> Iterator[Measurement]:
    """N2 to N4: logprobs, gradients, and gradients of recomputed layers."""
    shape = bench.work.checked
    base = base_of(bench, shape, torch.float32)
    trainer = a_trainer(base, bench.work.rank, max_batch_tokens=64)
    data = random_data(shape, LENGTHS)
    batch = a_batch(trainer, data)
    output = trainer.forward_backward(MODEL, batch)
    ours = trainer.export_gradient(MODEL)
    with plain_transformers():
        merged = Merged(bench, shape, base, trainer, torch.float32)
        theirs = merged.gradients(data)
        with torch.no_grad():
            gaps = [
                np.abs(merged.logprobs(datum).cpu().numpy() - logprobs).max()
                for datum, logprobs in zip(data, output.logprobs, strict=True)
            ]
    yield Measurement(
        "N2", "trainer's logprobs - Hugging Face's, float32", largest_error(gaps), "", "<= 1e-4"
    )
    assert ours is not None
    yield Measurement(
        "N3", "gradients / Hugging Face's, float32", worst(ours, theirs), "", "<= 1e-3"
    )
    again = a_trainer(base, bench.work.rank, max_batch_tokens=64, max_kept_tokens=0)
    again.forward_backward(MODEL, batch)
    repeated = again.export_gradient(MODEL)
    assert repeated is not None
    yield Measurement(
        "N4", "gradients of recomputed layers / kept", worst(repeated, ours), "", "<= 1e-4"
    )


def bfloat16(bench: Bench) -> Iterator[Measurement]:
    """N5: the engine's bfloat16 rounding error relative to Hugging Face's, both against float32."""
    shape = bench.work.checked
    base = base_of(bench, shape)
    trainer = a_trainer(base, bench.work.rank, max_batch_tokens=64)
    data = random_data(shape, LENGTHS)
    output = trainer.forward(MODEL, a_batch(trainer, data))
    with plain_transformers(), torch.no_grad():
        exact, rounded = (
            Merged(bench, shape, base, trainer, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
        truth = torch.cat([exact.logprobs(datum) for datum in data]).cpu().numpy()
        theirs = torch.cat([rounded.logprobs(datum) for datum in data]).cpu().numpy()
    ours = np.concatenate(output.logprobs)
    errors = [float(np.abs(values - truth).mean()) for values in (ours, theirs)]
    note = f"{errors[0]:.1e} and {errors[1]:.1e} from float32, in the mean"
    yield Measurement(
        "N5", "error of logprobs / Hugging Face's, bfloat16", errors[0] / errors[1], "x",
        "<= 1.5", note=note,
    )  # fmt: skip


def sampling(bench: Bench) -> Iterator[Measurement]:
    """N6, N7, G13: logprobs of sampled tokens against the trainer's and against eager steps'."""
    for dtype in (torch.float32, torch.bfloat16):
        base = base_of(bench, bench.work.checked, dtype)
        trainer = a_trainer(base, bench.work.rank, max_batch_tokens=1024)
        # Without graph capture, steps run eagerly with the same padding as captured ones.
        graph_capturer = graph_capturer_for(bench.device) or (lambda compute: compute)
        drawn = _sampled(bench, base, trainer, graph_capturer)
        gap = _gap(drawn, [trained_logprobs(trainer, _prompt(bench), s.tokens) for s in drawn])
        if dtype == torch.float32:
            yield Measurement(
                "N6", "sampling - training logprobs, float32", largest_error(gap), "", "<= 1e-4"
            )
            yield _recorded(bench, base, trainer, graph_capturer)
            continue
        note = f"its mean exp {float(np.exp(gap).mean()):.4f} (target: at most 1.05)"
        yield Measurement(
            "G13", "mean gap of sampling and training logprobs, bfloat16", float(gap.mean()), "",
            "<= 0.02", "<= 1e-3", note,
        )  # fmt: skip


def _recorded(
    bench: Bench, base: TorchBaseModel, trainer: TorchTrainer, graph_capturer: GraphCapturer
) -> Measurement:
    """N7: sequences of an adapter, alone and in a batch with the base's."""
    recorded, computed = (
        _sampled(bench, base, trainer, each, ("v1",))
        + _sampled(bench, base, trainer, each, ("v1", "base"))
        for each in (graph_capturer, None)
    )
    same = [s.tokens for s in recorded] == [s.tokens for s in computed]
    gap = _gap(recorded, [np.asarray(s.logprobs) for s in computed])
    return Measurement(
        "N7", "captured - eager decoding steps, same tokens, float32",
        largest_error(gap) if same else math.inf, "", "<= 1e-4",
    )  # fmt: skip


def _gap(drawn: Sequence[SampledSequence], others: Sequence[np.ndarray]) -> np.ndarray:
    gaps = [np.abs(s.logprobs - other) for s, other in zip(drawn, others, strict=True)]
    return np.concatenate(gaps)


def _sampled(
    bench: Bench,
    base: TorchBaseModel,
    trainer: TorchTrainer,
    graph_capturer: GraphCapturer | None,
    versions: Sequence[str] = ("v1",),
) -> list[SampledSequence]:
    """Return sequences sampled together with the trainer's adapter ("v1") or the base."""
    work = bench.work
    with a_sampler(base, work.together, graph_capturer) as sampler:
        sampler.publish("v1", trainer.publication(MODEL)())
        sampler.publish("base", None)
        request = a_request(_prompt(bench), work.drawn, num_samples=3)
        results = sampler.sample_all([(version, request) for version in versions])
    return [sequence for result in results for sequence in result.sequences]


def _prompt(bench: Bench) -> list[int]:
    return a_prompt(bench.work.checked, bench.work.prompt, seed=0)


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of two gradients, tensor by tensor."""
    assert ours.keys() == theirs.keys()
    return largest_error(_difference(ours[n].cpu(), tensor.cpu()) for n, tensor in theirs.items())


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative difference of ours from theirs; from zeros it is zero only for zeros."""
    apart, size = float((ours - theirs).norm()), float(theirs.norm())
    if size == 0:
        return 0.0 if apart == 0 else math.inf
    return apart / size
