"""How fast adapters are trained, how long sequences may be, and what adapters cost."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from benchmarks.bare_loop import BareLoop
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import MODEL, a_batch, a_trainer, base_of, fill, random_data, step
from benchmarks.gpu.workloads import Batch, Shape
from benchmarks.measuring import Measurement
from tinkercloud_protocol.payloads import Datum
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.torch_trainer.unembed import Unembedding, logprobs_and_gradient

_MICRO_BATCHES = (16384, 8192, 4096, 2048)
"""Tokens of micro-batches, of which the largest that fits is measured."""


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
    base = base_of(bench, shape)
    data = random_data(shape, [batch.length] * batch.sequences)
    tokens, (seconds, adapter) = bench.largest(
        _MICRO_BATCHES, lambda tokens: _step_seconds(bench, base, data, tokens)
    )
    speed = batch.tokens / seconds
    what = f"{shape.name}, {batch.sequences} x {batch.length} tokens, rank {bench.work.rank}"
    note = f"{speed:.0f} tokens/s in micro-batches of {tokens}"
    if bench.peak_flops is None:
        return Measurement(name, what, speed, "tokens/s", ">= 0", note=f"{note}; peak unknown")
    share = shape.training_flops(batch.length, adapter) * speed / bench.peak_flops
    least, strong = (f">= {bound}" for bound in wanted)
    return Measurement(name, what, share, "MFU", least, strong, note)


def _step_seconds(
    bench: Bench, base: BaseModel, data: Sequence[Datum], max_batch_tokens: int
) -> tuple[float, int]:
    """Return the time of a step and the adapter's elements."""
    trainer = a_trainer(base, bench.work.rank, max_batch_tokens)
    batch = a_batch(trainer, data)
    (seconds,) = bench.seconds(lambda: step(trainer, batch))
    elements = sum(tensor.numel() for tensor in trainer.snapshot(MODEL).tensors.values())
    return seconds, elements


def bare(bench: Bench) -> Iterator[Measurement]:
    """G4, G5: the trainer beside a plain loop, with real lengths and with equal ones."""
    work = bench.work
    loop = BareLoop(work.small.build(bench.device, bench.dtype), work.rank)
    base = base_of(bench, work.small)
    rng = np.random.default_rng(1)
    most = work.longest_ragged
    lengths = np.clip(most * rng.lognormal(-2, 0.8, 7), 4, most).astype(int).tolist()
    ragged, equal = [most, *lengths], [most // 4] * 8
    for name, lengths, wanted in (("G4", ragged, (3, 5)), ("G5", equal, (1.3, 2))):
        data = random_data(work.small, lengths)
        tokens, (seconds, plain) = bench.largest(
            _MICRO_BATCHES, partial(_beside, bench, base, loop, data)
        )
        full = sum(lengths) / (len(lengths) * max(lengths))
        what = f"{work.small.name}: trainer / plain loop, {full:.0%} of its batch is tokens"
        note = f"micro-batches of {tokens}; {1e3 * seconds:.0f} ms beside {1e3 * plain:.0f}"
        least, strong = (f">= {bound}" for bound in wanted)
        yield Measurement(name, what, plain / seconds, "x", least, strong, note)


def _beside(
    bench: Bench, base: BaseModel, loop: BareLoop, data: Sequence[Datum], max_batch_tokens: int
) -> list[float]:
    trainer = a_trainer(base, bench.work.rank, max_batch_tokens)
    batch = a_batch(trainer, data)
    return bench.seconds(lambda: step(trainer, batch), lambda: loop.step(data))


def tenants(bench: Bench) -> Iterator[Measurement]:
    """G8: as many models as sequences, beside one model with all of them."""
    work = bench.work
    batch = work.tenants_batch
    trainer = a_trainer(base_of(bench, work.middle), work.rank, batch.tokens)
    data = random_data(work.middle, [batch.length] * batch.sequences)
    together = a_batch(trainer, data)
    alone = [(f"tenant-{index}", a_batch(trainer, [datum])) for index, datum in enumerate(data)]
    for model_id, _ in alone:
        trainer.add_model(model_id, LoraConfig(rank=work.rank, seed=1))
        fill(trainer, model_id)

    def each() -> None:
        for model_id, part in alone:
            step(trainer, part, model_id)

    many, one = bench.seconds(each, lambda: step(trainer, together))
    what = f"{work.middle.name}: {batch.sequences} models in turn / one, {batch.length} tokens each"
    yield Measurement("G8", what, many / one, "x", "<= 1.15", "<= 1.05")


def adapter_cost(bench: Bench) -> Iterator[Measurement]:
    """G9: a step with an adapter, beside the frozen base forward and back to its input."""
    work = bench.work
    base = base_of(bench, work.middle)
    data = random_data(work.middle, [work.middle_batch.length])
    trainer = a_trainer(base, work.rank, work.middle_batch.length)
    batch = a_batch(trainer, data)
    ids = torch.from_numpy(data[0].tokens.astype(np.int64))[None].to(bench.device)
    targets = torch.from_numpy(data[0].inputs["target_tokens"])[:, None].to(bench.device)
    adapted, frozen = bench.seconds(
        lambda: step(trainer, batch), lambda: _frozen_step(base, ids, targets)
    )
    what = f"{work.middle.name}: step with adapter / frozen base, {len(data[0].tokens)} tokens"
    yield Measurement("G9", what, adapted / frozen, "x", "<= 1.20", "<= 1.08")


def _frozen_step(base: BaseModel, ids: torch.Tensor, targets: torch.Tensor) -> None:
    embedding = base.named_weights()["model.embed_tokens.weight"]
    inputs = torch.nn.functional.embedding(ids, embedding).requires_grad_()
    # The trunk itself: a pass of the engine begins with token ids, which have no gradient.
    hidden = base._trunk(inputs_embeds=inputs, use_cache=False).last_hidden_state
    _, gradient = logprobs_and_gradient(
        Unembedding(base.frozen_head, None),
        hidden.detach()[0],
        targets,
        lambda _, lp: torch.full_like(lp, -1.0),
    )
    hidden.backward(gradient[None])


def longest_context(bench: Bench) -> Iterator[Measurement]:
    """G10: the longest sequence that can be trained, layers computed again."""
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


def _long_step_seconds(bench: Bench, base: BaseModel, length: int) -> float:
    trainer = a_trainer(base, bench.work.rank, length, max_kept_tokens=0)
    batch = a_batch(trainer, random_data(bench.work.large, [length]))
    return bench.first_seconds(lambda: step(trainer, batch))
