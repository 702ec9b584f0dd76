"""Memory of a training step: the estimate of `tinkercloud plan` against the measurement."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.engines import MODEL, a_batch, a_trainer, base_of, random_data, release_base
from benchmarks.gpu.workloads import Batch, Shape
from benchmarks.shared.measuring import Measurement
from tinkercloud_planning import memory
from tinkercloud_planning.activations import FUSED, SEPARATE, Kernels
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import gpu
from tinkercloud_planning.layouts import Layout
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_worker.engine.trainer import DirectTrainer
from tinkercloud_worker.model.fused_kernels import are_fused

_GIB = 1 << 30

Made = Callable[[Bench, Shape, int], AbstractContextManager[DirectTrainer]]
"""Creates a trainer from a shape and the tokens of a micro-batch, with activation checkpointing as
in GPU trainer pods."""


@contextmanager
def _torch(bench: Bench, shape: Shape, tokens: int) -> Iterator[DirectTrainer]:
    yield a_trainer(base_of(bench, shape), bench.work.rank, tokens, max_kept_tokens=0)


@contextmanager
def _megatron(bench: Bench, shape: Shape, tokens: int) -> Iterator[DirectTrainer]:
    # Imported here, so that the torch trainer is measured without megatron-core.
    from benchmarks.gpu.megatron import a_megatron, alone, made  # noqa: PLC0415

    with alone(bench) as device:
        yield a_megatron(made(bench, shape, device), bench.work.rank, tokens, max_kept_tokens=0)


def torch_trainer(bench: Bench) -> Iterator[Measurement]:
    """P1 to P5: the torch trainer."""
    kernels = FUSED if are_fused(bench.device, torch.bfloat16) else SEPARATE
    yield from _compare(bench, "torch", _torch, ("P1", "P2", "P3", "P4"), kernels)
    yield _fill(bench, "torch", _torch, "P5", kernels)


def megatron(bench: Bench) -> Iterator[Measurement]:
    """P6 to P10: the megatron trainer."""
    yield from _compare(bench, "megatron", _megatron, ("P6", "P7", "P8", "P9"), SEPARATE)
    yield _fill(bench, "megatron", _megatron, "P10", SEPARATE)


def _compare(
    bench: Bench, trainer: str, make: Made, names: Sequence[str], kernels: Kernels
) -> Iterator[Measurement]:
    """Compare estimates with the peak memory of steps of several shapes."""
    if bench.device.type != "cuda":
        raise Skipped(f"memory: {bench.device.type} has no memory statistics")
    for name, (shape, batch) in zip(names, bench.work.estimated, strict=True):
        release_base(bench)
        estimate = memory.training(
            read(shape.config().to_dict()),
            Layout(),
            tokens=batch.tokens,
            lora_rank=bench.work.rank,
            kernels=kernels,
        )
        held, peak = _measure(bench, partial(make, bench, shape, batch.tokens), shape, batch)
        planned = estimate.total - estimate.fragments
        kept = estimate.weights + estimate.trained
        note = (
            f"{peak / _GIB:.2f} GiB, estimated {planned / _GIB:.2f}; weights and adapter"
            f" {held / _GIB:.2f}, estimated {kept / _GIB:.2f}"
        )
        what = f"{trainer}, {shape.name}, {batch.sequences} x {batch.length} tokens"
        yield Measurement(
            name, f"{what}: |estimated / peak memory - 1|",
            abs(planned / peak - 1), "", "<= 0.10", "<= 0.05", note,
        )  # fmt: skip


def _measure(
    bench: Bench,
    make: Callable[[], AbstractContextManager[DirectTrainer]],
    shape: Shape,
    batch: Batch,
) -> tuple[int, int]:
    """Return the bytes held between steps, including moments, and the peak within a step."""
    before = torch.cuda.memory_allocated(bench.device)
    with make() as trainer:
        data = a_batch(trainer, random_data(shape, [batch.length] * batch.sequences))

        def whole_step() -> None:
            trainer.forward_backward(MODEL, data)
            trainer.optim_step(MODEL, AdamParams())

        whole_step()
        bench.finish()
        held = torch.cuda.memory_allocated(bench.device) - before
        beyond, _ = bench.peak_bytes(whole_step)
        return held, held + beyond


def _fill(bench: Bench, trainer: str, make: Made, name: str, kernels: Kernels) -> Measurement:
    """Train the largest micro-batch planned for a GPU within its memory."""
    shape, kind = bench.work.middle, gpu(f"{bench.work.filled}GiB")
    model = read(shape.config().to_dict())
    available = kind.memory - kind.contexts(processes=1)
    tokens = memory.largest_micro_batch(
        model, Layout(), available=available, lora_rank=bench.work.rank, kernels=kernels
    )
    batch = Batch(1, tokens // 256 * 256)
    release_base(bench)
    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.set_per_process_memory_fraction(available / total)
    try:
        _, peak = _measure(bench, partial(make, bench, shape, batch.tokens), shape, batch)
    except torch.OutOfMemoryError:
        peak = 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    what = f"{trainer}, {shape.name}: the {batch.tokens} tokens planned for {kind.name} fit"
    note = f"{peak / _GIB:.2f} GiB of tensors, {available / _GIB:.2f} with what is between them"
    return Measurement(name, what, float(peak > 0), "", ">= 1", note=note)
