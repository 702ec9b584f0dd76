"""What leaves the GPU while others train: adapters that are idle, and snapshots."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import MODEL, a_batch, a_trainer, base_of, random_data, step
from benchmarks.shared.measuring import Measurement
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_worker.training.paging import HostMemory, Models
from tinkercloud_worker.training.trained_model import new_adapter

_SEED = 5


def paging(bench: Bench) -> Iterator[Measurement]:
    """G15: how long an idle adapter with moments takes to return from pinned host memory.

    Raises:
        ValueError: it has returned with other values.
    """
    work = bench.work
    base, room = base_of(bench, work.middle), [1 << 40]
    models = Models(HostMemory(lambda: None), lambda size: size - room[0])
    model = new_adapter(base.targets, LoraConfig(rank=work.rank, seed=1), bench.device)
    model.begin_moments()
    generator = torch.Generator().manual_seed(_SEED)
    weights, _, *moments = model.vectors
    for vector in (weights, *moments):
        vector.copy_(torch.rand(vector.shape, generator=generator))
    expected = [vector.clone() for vector in model.vectors]
    models["m"] = model

    def leave() -> None:
        room[0] = 0
        models.make_room(1)

    def come_back() -> None:
        room[0] = 1 << 40
        models["m"]

    leaving, returning = bench.seconds(leave, come_back, rounds=max(work.rounds, 3))
    if not all(map(torch.equal, model.vectors, expected)):
        raise ValueError("the adapter has returned with other values")
    size = sum(vector.nbytes for vector in (weights, *moments)) / 1e6
    note = f"{size:.0f} MB; leaves in {1e3 * leaving:.0f} ms"
    what = f"{work.middle.name}: an idle adapter of rank {work.rank} returns"
    yield Measurement("G15", what, 1e3 * returning, "ms", "<= 100", "<= 30", note)


def snapshots(bench: Bench) -> Iterator[Measurement]:
    """G16: how long a snapshot holds the engine's thread, once pinned memory is allocated.

    Raises:
        ValueError: the copy is not that of the moment at which it was started.
    """
    work = bench.work
    trainer = a_trainer(base_of(bench, work.middle), work.rank, max_batch_tokens=1024)
    batch = a_batch(trainer, random_data(work.middle, [64]))
    held, total = list[float](), list[float]()
    for _ in range(1 + max(work.rounds, 3)):
        step(trainer, batch)
        trainer.forward_backward(MODEL, batch)
        trainer.optim_step(MODEL, AdamParams(learning_rate=1e-3))
        bench.finish()
        expected = trainer.copy_weights(MODEL).tensors
        began = time.perf_counter()
        take = trainer.begin_export(MODEL)
        held.append(time.perf_counter() - began)
        trainer.forward_backward(MODEL, batch)
        trainer.optim_step(MODEL, AdamParams(learning_rate=1e-3))
        taken = take()
        total.append(time.perf_counter() - began)
        if not all(torch.equal(taken.weights.tensors[name], expected[name]) for name in expected):
            raise ValueError("a step that came later has changed the copy")
        del taken, take
    what = f"{work.middle.name}: a snapshot holds the engine's thread, rank {work.rank}"
    note = f"first {1e3 * held[0]:.0f} ms; complete after {1e3 * min(total[1:]):.0f} ms"
    pause = sorted(held[1:])[len(held[1:]) // 2]
    yield Measurement("G16", what, 1e3 * pause, "ms", "<= 5", "<= 1", note)
