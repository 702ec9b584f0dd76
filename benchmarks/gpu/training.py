"""Training speed of adapters, maximum sequence length, and the cost of adapters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import MODEL, a_batch, a_trainer, base_of, fill, random_data, step
from benchmarks.gpu.workloads import Batch, Shape, plain_transformers
from benchmarks.shared.bare_loop import BareLoop
from benchmarks.shared.measuring import Measurement
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_worker.engine.trainer import DirectTrainer, TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.logprobs import logprobs_and_gradient

_FEW_TOKENS = 16
"""Tokens of each model in a pass that launching kernels dominates."""
_MICRO_BATCHES = (16384, 8192, 4096, 2048)
"""Candidate tokens of a micro-batch; the largest one that fits is measured."""


def small(bench: Bench) -> Iterator[Measurement]:
    """G3: many short sequences of a small model."""
    work = bench.work
    yield _throughput(bench, "G3", work.small, work.small_batch, (0.20, 0.35))


def middle(bench: Bench) -> Iterator[Measurement]:
    """G2: a model of some billions of parameters."""
    work = bench.work
    yield _throughput(bench, "G2", work.middle, work.middle_batch, (0.30, 0.45))


def large(bench: Bench) -> Iterator[Measurement]:
    """G1: the largest model that is measured."""
    work = bench.work
    yield _throughput(bench, "G1", work.large, work.large_batch, (0.35, 0.50))


def _throughput(
    bench: Bench, name: str, shape: Shape, batch: Batch, wanted: tuple[float, float]
) -> Measurement:
    make = partial(a_trainer, base_of(bench, shape), bench.work.rank)
    return throughput(bench, make, shape, batch).figure(name, shape.name, wanted)


@dataclass(frozen=True)
class Throughput:
    """How fast a batch is trained."""

    rank: int
    batch: Batch
    micro_batch: int
    """Tokens."""
    tokens_per_second: float
    share: float | None
    """Fraction of the GPU's peak; None if the peak is unknown."""

    def figure(self, name: str, what: str, wanted: tuple[float, float]) -> Measurement:
        """Return it as a figure, with target and strong fractions of the peak."""
        batch, speed = self.batch, self.tokens_per_second
        what = f"{what}, {batch.sequences} x {batch.length} tokens, rank {self.rank}"
        note = f"{speed:.0f} tokens/s in micro-batches of {self.micro_batch}"
        if self.share is None:
            return Measurement(name, what, speed, "tokens/s", ">= 0", note=f"{note}; peak unknown")
        least, strong = (f">= {bound}" for bound in wanted)
        return Measurement(name, what, self.share, "MFU", least, strong, note)


def throughput(
    bench: Bench, make: Callable[[int], DirectTrainer], shape: Shape, batch: Batch
) -> Throughput:
    """Measure a trainer with the largest micro-batch that fits."""
    data = random_data(shape, [batch.length] * batch.sequences)
    tokens, (seconds, adapter) = bench.largest(
        _MICRO_BATCHES, lambda tokens: _step_seconds(bench, make(tokens), data)
    )
    speed = batch.tokens / seconds
    share = None
    if bench.peak_flops is not None:
        share = shape.training_flops(batch.length, adapter) * speed / bench.peak_flops
    return Throughput(bench.work.rank, batch, tokens, speed, share)


def _step_seconds(bench: Bench, trainer: DirectTrainer, data: Sequence[Datum]) -> tuple[float, int]:
    """Return the time of a step and the adapter's elements."""
    batch = a_batch(trainer, data)
    (seconds,) = bench.seconds(lambda: step(trainer, batch))
    elements = sum(tensor.numel() for tensor in trainer.copy_weights(MODEL).tensors.values())
    return seconds, elements


def bare(bench: Bench) -> Iterator[Measurement]:
    """G4, G5: the trainer against a plain loop, with realistic and with equal lengths."""
    work = bench.work
    with plain_transformers():
        loop = BareLoop(work.small.build(bench.device, bench.dtype), work.rank)
    base = base_of(bench, work.small)
    rng = np.random.default_rng(1)
    most = work.longest_ragged
    lengths = np.clip(most * rng.lognormal(-2, 0.8, 7), 4, most).astype(int).tolist()
    ragged, equal = [most, *lengths], [most // 4] * 8
    for name, lengths, wanted in (("G4", ragged, (3, 5)), ("G5", equal, (1.3, 2))):
        data = random_data(work.small, lengths)
        tokens, (seconds, plain) = bench.largest(
            _MICRO_BATCHES, partial(_compared, bench, base, loop, data)
        )
        full = sum(lengths) / (len(lengths) * max(lengths))
        what = f"{work.small.name}: trainer / plain loop, {full:.0%} of its batch is tokens"
        note = f"micro-batches of {tokens}; {1e3 * seconds:.0f} ms against {1e3 * plain:.0f}"
        least, strong = (f">= {bound}" for bound in wanted)
        yield Measurement(name, what, plain / seconds, "x", least, strong, note)


def _compared(
    bench: Bench, base: TorchBaseModel, loop: BareLoop, data: Sequence[Datum], max_batch_tokens: int
) -> list[float]:
    trainer = a_trainer(base, bench.work.rank, max_batch_tokens)
    batch = a_batch(trainer, data)

    def plain_step() -> None:
        with plain_transformers():
            loop.step(data)

    return bench.seconds(lambda: step(trainer, batch), plain_step)


def tenants(bench: Bench) -> Iterator[Measurement]:
    """G8: one model per sequence against one model with all sequences."""
    yield _tenants(bench, "G8", bench.work.tenants_batch, ("<= 1.15", "<= 1.05"))


def small_tenants(bench: Bench) -> Iterator[Measurement]:
    """G17: the same with few tokens, where launching kernels takes longer than running them."""
    batch = replace(bench.work.tenants_batch, length=_FEW_TOKENS)
    yield _tenants(bench, "G17", batch, ("<= 1.25", "<= 1.1"))


def _tenants(bench: Bench, name: str, batch: Batch, wanted: tuple[str, str]) -> Measurement:
    work = bench.work
    trainer = a_trainer(base_of(bench, work.middle), work.rank, batch.tokens)
    data = random_data(work.middle, [batch.length] * batch.sequences)
    alone = a_batch(trainer, data)
    passes = [
        TrainingPass(f"tenant-{index}", a_batch(trainer, [datum]))
        for index, datum in enumerate(data)
    ]
    for each in passes:
        trainer.add_model(each.model_id, LoraConfig(rank=work.rank, seed=1))
        fill(trainer, each.model_id)

    def together() -> None:
        trainer.run_batch(passes, lambda: None)
        for each in passes:
            trainer.discard_gradient(each.model_id)

    many, one = bench.seconds(together, lambda: step(trainer, alone))
    what = f"{work.middle.name}: {batch.sequences} models / one, {batch.length} tokens each"
    return Measurement(name, what, many / one, "x", *wanted)


def adapter_cost(bench: Bench) -> Iterator[Measurement]:
    """G9: a step with an adapter against the frozen base, forward and backward to its input."""
    work = bench.work
    batch = work.middle_batch
    base = base_of(bench, work.middle)
    data = random_data(work.middle, [batch.length] * batch.sequences)
    trainer = a_trainer(base, work.rank, batch.tokens)
    adapted = a_batch(trainer, data)
    ids = torch.from_numpy(np.stack([datum.tokens for datum in data]).astype(np.int64))
    targets = np.concatenate([datum.inputs["target_tokens"] for datum in data])
    rows = torch.from_numpy(targets)[:, None].to(bench.device)
    with_adapter, frozen = bench.seconds(
        lambda: step(trainer, adapted), lambda: _frozen_step(base, ids.to(bench.device), rows)
    )
    what = f"{work.middle.name}: step with adapter / frozen base, {batch.tokens} tokens"
    yield Measurement("G9", what, with_adapter / frozen, "x", "<= 1.20", "<= 1.08")


def _frozen_step(base: TorchBaseModel, ids: torch.Tensor, targets: torch.Tensor) -> None:
    embedding = base.named_weights()["model.embed_tokens.weight"]
    inputs = torch.nn.functional.embedding(ids, embedding).requires_grad_()
    # The backbone alone: engine passes start from token ids, which have no gradient.
    hidden = base._backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state
    _, gradient = logprobs_and_gradient(
        LMHead(base.frozen_lm_head, ()),
        hidden.detach().flatten(0, 1),
        targets,
        lambda _, lp: torch.full_like(lp, -1.0),
    )
    hidden.backward(gradient.view_as(hidden))


def longest_context(bench: Bench) -> Iterator[Measurement]:
    """G10: the longest sequence that can be trained, with recomputed layers."""
    work = bench.work
    base = base_of(bench, work.large)
    found, note = 0, "none of those tried"
    for length in work.contexts:
        with suppress(torch.OutOfMemoryError):
            seconds = _long_step_seconds(bench, base, length)
            found, note = length, f"{length / seconds:.0f} tokens/s"
        bench.tidy()
    tried = ", ".join(map(str, work.contexts))
    what = f"{work.large.name}: tokens of the longest sequence, of {tried}"
    yield Measurement("G10", what, found, "tokens", ">= 65536", ">= 131072", note)


def _long_step_seconds(bench: Bench, base: TorchBaseModel, length: int) -> float:
    trainer = a_trainer(base, bench.work.rank, length, max_kept_tokens=0)
    batch = a_batch(trainer, random_data(bench.work.large, [length]))
    return bench.first_seconds(lambda: step(trainer, batch))
