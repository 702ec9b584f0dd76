"""The trainer against a plain transformers + PEFT loop on the same model and data."""

import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shared.bare_loop import BareLoop
from benchmarks.shared.limits import gradients, products
from benchmarks.shared.measuring import Measurement, medians, peak_rss_bytes
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import Datum, ForwardBackwardRequest
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.engine.batch import Batch, prepare
from tinkercloud_worker.engine.trainer import TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.logprobs import logprobs_and_gradient
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

RANK = 16
LORA = LoraConfig(rank=RANK, seed=1, train_unembed=False)


def a_batch(trainer: TorchTrainer, data: Sequence[Datum]) -> Batch:
    request = ForwardBackwardRequest(
        "s:train:0", 1, tuple(data), "cross_entropy", loss_fn_config={}, forward_only=False
    )
    return prepare(request, trainer.limits)


def random_data(lengths: Sequence[int], vocab_size: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    return [
        Datum(
            rng.integers(0, vocab_size, length).astype(np.int32),
            {"target_tokens": rng.integers(0, vocab_size, length)},
        )
        for length in lengths
    ]


def measure(folder: str) -> Iterator[Measurement]:
    base = TorchBaseModel.load(folder, torch.float32)
    trainer = TorchTrainer(base, max_batch_tokens=2048)
    trainer.add_model("m", LORA)
    bare = BareLoop(AutoModelForCausalLM.from_pretrained(folder), RANK)
    vocab_size = trainer.limits.vocab_size

    def step(batch: Batch) -> None:
        trainer.forward_backward("m", batch)
        trainer.discard_gradient("m")

    ragged = random_data([256, 24, 31, 40, 22, 64, 90, 48], vocab_size)
    efficiency = sum(len(d.tokens) for d in ragged) / (len(ragged) * 256)
    batch = a_batch(trainer, ragged)
    ours, theirs = medians(lambda: step(batch), lambda: bare.step(ragged), rounds=5)
    note = f"padding efficiency of the plain loop {efficiency:.2f}"
    yield Measurement(
        "C1", "trainer / plain loop, ragged batch", theirs / ours, "x", ">= 2.5", ">= 3.1", note
    )

    equal = random_data([128] * 4, vocab_size)
    batch_equal = a_batch(trainer, equal)
    ours, theirs, forward, backward = medians(
        lambda: step(batch_equal),
        lambda: bare.step(equal),
        products(base, 4 * 128),
        gradients(base, 4 * 128),
        rounds=5,
    )
    note = f"limit, the products alone: {theirs / (forward + backward):.2f}"
    yield Measurement(
        "C2", "trainer / plain loop, equal lengths", theirs / ours, "x", ">= 0.95", ">= 1.2", note
    )

    yield from _adapter_swap(trainer, vocab_size)
    yield _adapters_together(trainer, vocab_size)
    yield _split_in_chunks(trainer, vocab_size)
    yield from _head_memory()
    yield _packing(trainer, vocab_size)


def _adapter_swap(trainer: TorchTrainer, vocab_size: int) -> Iterator[Measurement]:
    trainer.add_model("other", LORA)
    batch = a_batch(trainer, random_data([32] * 2, vocab_size))

    def steps(*names: str) -> None:
        for name in names:
            trainer.forward_backward(name, batch)
            trainer.optim_step(name, AdamParams())

    same, alternating = medians(
        lambda: steps("m", "m", "m", "m"), lambda: steps("m", "other", "m", "other")
    )
    yield Measurement(
        "C9", "steps of two models in turn / of one", alternating / same, "x", "<= 1.05", "<= 1.01"
    )


def _adapters_together(trainer: TorchTrainer, vocab_size: int) -> Measurement:
    names = [f"together-{number}" for number in range(8)]
    for name in names:
        trainer.add_model(name, LORA)
    data = random_data([16] * 8, vocab_size)
    whole = a_batch(trainer, data)
    passes = [
        TrainingPass(name, a_batch(trainer, [datum]))
        for name, datum in zip(names, data, strict=True)
    ]

    def one_adapter() -> None:
        trainer.forward_backward("m", whole)
        trainer.discard_gradient("m")

    def eight_adapters() -> None:
        trainer.run_batch(passes, lambda: None)
        for name in names:
            trainer.discard_gradient(name)

    one, eight = medians(one_adapter, eight_adapters)
    return Measurement(
        "C7", "8 adapters x 16 tokens / one x 128", eight / one, "x", "<= 1.6", "<= 1.25"
    )


def _split_in_chunks(trainer: TorchTrainer, vocab_size: int) -> Measurement:
    data = random_data([64, 9, 33, 48, 17, 80, 5, 26], vocab_size)

    def gradient(*chunks: Sequence[Datum]) -> torch.Tensor:
        for chunk in chunks:
            trainer.forward_backward("m", a_batch(trainer, chunk))
        held = trainer.export_gradient("m")
        trainer.discard_gradient("m")
        assert held is not None
        return torch.cat([part.flatten() for _, part in sorted(held.items())])

    whole, chunked = gradient(data), gradient(*[data[i : i + 2] for i in range(0, 8, 2)])
    difference = float((whole - chunked).abs().max() / whole.abs().max())
    return Measurement(
        "C23", "gradient of 4 chunks / of one call, worst part", difference, "", "<= 1e-5"
    )


def _head_memory() -> Iterator[Measurement]:
    peaks = {}
    for name in ("ours", "whole"):
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            peaks[name] = pool.apply(_head_peak, (name,))
    ratio = peaks["ours"] / peaks["whole"]
    note = f"{peaks['ours'] >> 20} MiB against {peaks['whole'] >> 20} MiB at 4,096 positions"
    yield Measurement(
        "C3", "memory of the output layer / whole logits", ratio, "x", "<= 0.2", "<= 0.05", note
    )


def _head_peak(which: str) -> int:
    """Return the memory one output-layer pass needs, beyond its inputs."""
    positions, hidden_size, vocab_size = 4096, 64, 151_936
    hidden = torch.randn(positions, hidden_size, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size)
    targets = torch.randint(0, vocab_size, (positions, 1))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_rss_bytes()
    if which == "ours":
        layer = LMHead(FrozenLinear(weight, None), ())
        logprobs_and_gradient(layer, hidden.detach(), targets, lambda _, lp: torch.ones_like(lp))
    else:
        logits = hidden @ weight.T
        loss = torch.nn.functional.cross_entropy(logits, targets[:, 0], reduction="sum")
        torch.autograd.backward(loss)
    return peak_rss_bytes() - before


def _packing(trainer: TorchTrainer, vocab_size: int) -> Measurement:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5, 1, 64).astype(int), 8, 2048).tolist()
    packs = list(trainer._packs(a_batch(trainer, random_data(lengths, vocab_size))))
    computed = sum(pack.sequences.ids_R.numel() for pack in packs)
    return Measurement(
        "C22",
        "tokens / positions computed for them, lognormal lengths",
        sum(lengths) / computed,
        "",
        ">= 0.9",
        ">= 0.97",
        f"{len(packs)} packs of at most 2,048",
    )
