"""The megatron trainer on one rank, compared with Hugging Face and the torch trainer.

Weights are saved by Hugging Face and loaded as in a trainer pod; speed benchmarks initialize random
weights in place.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, missing in __all__

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.engines import (
    MODEL,
    a_batch,
    a_trainer,
    base_of,
    fill,
    random_data,
    release_base,
)
from benchmarks.gpu.numerics import LENGTHS, Merged, worst
from benchmarks.gpu.training import throughput
from benchmarks.gpu.workloads import Batch, Shape
from benchmarks.shared.measuring import Measurement, largest_error
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_worker.engine.trainer import DirectTrainer, LossOutput, TrainingState
from tinkercloud_worker.megatron_trainer.devices.device import Device
from tinkercloud_worker.megatron_trainer.devices.select_device import device_of
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import MegatronModel, blank, load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer

_STEPS = 5
_ADAM = AdamParams(learning_rate=1e-3)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@contextmanager
def alone(bench: Bench) -> Iterator[Device]:
    """Make this process the only rank of a group, and yield the device of megatron-core.

    Raises:
        Skipped: megatron-core does not support this device.
    """
    kind = bench.device.type
    if kind not in _BACKENDS:
        raise Skipped(f"megatron-core runs on {' or '.join(_BACKENDS)}, not on {kind}")
    dist.init_process_group(_BACKENDS[kind], store=HashStore(), rank=0, world_size=1)
    try:
        yield device_of(kind)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        bench.tidy()


def loaded(bench: Bench, shape: Shape, device: Device, dtype: torch.dtype) -> MegatronModel:
    """Return a model with the same weights as `base_of`."""
    with tempfile.TemporaryDirectory() as folder:
        shape.build(bench.device, dtype).save_pretrained(folder)
        bench.tidy()
        return load(folder, dtype, Parallelism(), device)


def made(bench: Bench, shape: Shape, device: Device) -> MegatronModel:
    """Return a model of random weights."""
    model, _ = blank(shape.config(), bench.dtype, Parallelism(), device)
    for name, weight in model.module.named_parameters():
        if "norm" in name:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=0.02)
    return model


def a_megatron(
    base: MegatronModel, rank: int, max_batch_tokens: int, max_kept_tokens: int | None = None
) -> DirectTrainer:
    """Return a trainer with one model, an adapter of random weights, as `engines.a_trainer`."""
    trainer = MegatronTrainer(
        base, max_batch_tokens=max_batch_tokens, max_kept_tokens=max_kept_tokens
    )
    trainer.add_model(MODEL, LoraConfig(rank=rank, seed=1))
    fill(trainer, MODEL)
    return trainer


def dense(bench: Bench) -> Iterator[Measurement]:
    """M1, M2, M5: logprobs and gradients of a dense model, with and without recomputed layers."""
    shape = bench.work.checked
    with alone(bench) as device:
        base = loaded(bench, shape, device, torch.float32)
        yield from _against_others(bench, shape, base, ("M1", "M2"))
        batch_tokens, data = max(LENGTHS), random_data(shape, LENGTHS)
        kept = a_megatron(base, bench.work.rank, batch_tokens)
        again = a_megatron(base, bench.work.rank, batch_tokens, max_kept_tokens=0)
        gradients = []
        for trainer in (again, kept):
            _run(trainer, data)
            gradients.append(trainer.export_gradient(MODEL) or {})
    yield Measurement(
        "M5", "megatron: gradients of recomputed layers / kept", worst(*gradients), "",
        "<= 1e-4",
    )  # fmt: skip


def mixture(bench: Bench) -> Iterator[Measurement]:
    """M3, M4: logprobs and gradients of a mixture with adapted experts."""
    shape = bench.work.mixture
    with alone(bench) as device:
        base = loaded(bench, shape, device, torch.float32)
        yield from _against_others(bench, shape, base, ("M3", "M4"))


def _against_others(
    bench: Bench, shape: Shape, base: MegatronModel, names: tuple[str, str]
) -> Iterator[Measurement]:
    """Compare logprobs and gradients with Hugging Face's and the torch trainer's, in float32."""
    torch_base = base_of(bench, shape, torch.float32)
    torch_trainer = a_trainer(torch_base, bench.work.rank, max_batch_tokens=max(LENGTHS))
    trainer = a_megatron(base, bench.work.rank, max_batch_tokens=max(LENGTHS))
    merged = Merged(bench, shape, torch_base, torch_trainer, torch.float32)
    data = random_data(shape, LENGTHS)
    output, torch_output = (_run(each, data) for each in (trainer, torch_trainer))
    ours, torchs = (each.export_gradient(MODEL) or {} for each in (trainer, torch_trainer))
    errors = [worst(ours, theirs) for theirs in (merged.gradients(data), torchs)]
    with torch.no_grad():
        exact = np.concatenate([merged.logprobs(datum).cpu().numpy() for datum in data])
    gaps = [
        largest_error(np.abs(np.concatenate(output.logprobs) - theirs))
        for theirs in (exact, np.concatenate(torch_output.logprobs))
    ]
    note = "Hugging Face {:.1e}, torch trainer {:.1e}"
    what = f"megatron, {shape.name}: {{}}, float32"
    yield Measurement(
        names[0], what.format("logprobs - others'"), largest_error(gaps), "", "<= 1e-4",
        "<= 1e-5", note.format(*gaps),
    )  # fmt: skip
    yield Measurement(
        names[1], what.format("gradients / others'"), largest_error(errors), "", "<= 1e-3",
        "<= 1e-4", note.format(*errors),
    )  # fmt: skip


def _run(trainer: DirectTrainer, data: Sequence[Datum]) -> LossOutput:
    return trainer.forward_backward(MODEL, a_batch(trainer, data))


def steps(bench: Bench) -> Iterator[Measurement]:
    """M6, M7: Adam steps against the torch trainer's, which then continues from megatron's
    state."""
    shape = bench.work.checked
    with alone(bench) as device:
        base = loaded(bench, shape, device, torch.float32)
        trainer = a_megatron(base, bench.work.rank, max_batch_tokens=max(LENGTHS))
        torch_base = base_of(bench, shape, torch.float32)
        torch_trainer = a_trainer(torch_base, bench.work.rank, max_batch_tokens=max(LENGTHS))
        data = random_data(shape, LENGTHS)
        losses: list[list[float]] = [[], []]
        for _ in range(_STEPS):
            for each, sums in zip((trainer, torch_trainer), losses, strict=True):
                sums.append(_run(each, data).metrics["loss:sum"])
                each.optim_step(MODEL, _ADAM)
        apart = largest_error(abs(ours / theirs - 1) for ours, theirs in zip(*losses, strict=True))
        note = f"from {losses[0][0]:.2f} to {losses[0][-1]:.2f} in {_STEPS} steps"
        yield Measurement(
            "M6", "megatron: losses of Adam's steps / torch trainer's - 1, float32", apart,
            "", "<= 1e-3", "<= 1e-5", note,
        )  # fmt: skip
        state = trainer.export_state(MODEL)
        torch_trainer.import_state(MODEL, state)
        arrived = torch_trainer.export_state(MODEL)
        here, there = (
            np.concatenate(each.forward(MODEL, a_batch(each, data)).logprobs)
            for each in (trainer, torch_trainer)
        )
    yield handed_over(state, arrived, largest_error(np.abs(here - there)))


def handed_over(sent: TrainingState, arrived: TrainingState, gap: float) -> Measurement:
    """Return M7: the difference of logprobs; infinity unless the full state has arrived.

    Args:
        sent: the state exported by megatron, after some steps.
        arrived: the state in the torch trainer.
        gap: the difference of both logprobs.
    """
    tensors, others = _tensors(sent), _tensors(arrived)
    equal = sum(
        name in others and torch.equal(tensor.cpu(), others[name].cpu())
        for name, tensor in tensors.items()
    )
    # A value and two moments of each.
    count = 3 * len(sent.weights.tensors)
    is_whole = equal == count == len(others) and arrived.step == sent.step == _STEPS
    note = f"{equal} of {count} tensors equal, {arrived.step} of {_STEPS} steps"
    return Measurement(
        "M7", "megatron's state at the torch trainer: logprobs - megatron's, float32",
        gap if is_whole else math.inf, "", "<= 1e-4", "<= 1e-5", note,
    )  # fmt: skip


def _tensors(state: TrainingState) -> dict[str, Tensor]:
    return {**state.weights.tensors, **(state.moments or {})}


def bfloat16(bench: Bench) -> Iterator[Measurement]:
    """M8: megatron's bfloat16 rounding error relative to Hugging Face's, both against float32."""
    shape = bench.work.checked
    with alone(bench) as device:
        base = loaded(bench, shape, device, torch.bfloat16)
        torch_base = base_of(bench, shape)
        torch_trainer = a_trainer(torch_base, bench.work.rank, max_batch_tokens=max(LENGTHS))
        trainer = a_megatron(base, bench.work.rank, max_batch_tokens=max(LENGTHS))
        data = random_data(shape, LENGTHS)
        ours = np.concatenate(_run(trainer, data).logprobs)
    exact, rounded = (
        Merged(bench, shape, torch_base, torch_trainer, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        truth = torch.cat([exact.logprobs(datum) for datum in data]).cpu().numpy()
        theirs = torch.cat([rounded.logprobs(datum) for datum in data]).cpu().numpy()
    errors = [float(np.abs(values - truth).mean()) for values in (ours, theirs)]
    note = f"{errors[0]:.1e} and {errors[1]:.1e} from float32, in the mean"
    yield Measurement(
        "M8", "megatron: error of logprobs / Hugging Face's, bfloat16", errors[0] / errors[1],
        "x", "<= 1.5", note=note,
    )  # fmt: skip


def middle(bench: Bench) -> Iterator[Measurement]:
    """G2m: G2 with the megatron trainer."""
    yield _throughput(bench, "G2m", bench.work.middle, bench.work.middle_batch, (0.30, 0.45))


def large(bench: Bench) -> Iterator[Measurement]:
    """G1m: G1 with the megatron trainer."""
    yield _throughput(bench, "G1m", bench.work.large, bench.work.large_batch, (0.35, 0.50))


def _throughput(
    bench: Bench, name: str, shape: Shape, batch: Batch, wanted: tuple[float, float]
) -> Measurement:
    release_base(bench)
    with alone(bench) as device:
        make = partial(a_megatron, made(bench, shape, device), bench.work.rank)
        measured = throughput(bench, make, shape, batch)
    return measured.figure(name, f"megatron, {shape.name}", wanted)
