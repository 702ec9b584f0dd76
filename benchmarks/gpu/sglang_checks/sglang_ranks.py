"""Weights published by training ranks to a real SGLang server, against our torch trainer.

The ranks run megatron-core under Ray, as in Kubernetes; the session head has no model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Never

import ray
import torch

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.sglang_checks.sglang_proof import (
    BASE,
    RANK,
    SEEDS,
    SMALL,
    Proof,
    a_proof,
    gone_by,
    head_config,
    loads_of,
)
from benchmarks.shared.measuring import Measurement, largest_error
from tinkercloud_protocol.heads.launch import TrainerConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.build_trainer import build_trainer, build_weight_host
from tinkercloud_worker.engine.trainer import Trainer, WeightsCopy
from tinkercloud_worker.inference.sampler import InferenceSampler

_RANKS = 2
WHOLE = "whole"


@dataclass(frozen=True)
class Ranks:
    """A trainer of ranks, and the sampler of its head."""

    trainer: Trainer
    sampler: InferenceSampler
    how: str


def from_ranks(bench: Bench) -> Iterator[Measurement]:
    """S26, S27: adapters and a whole model of megatron's ranks, in float32.

    Raises:
        Skipped: there is no megatron-core.
    """
    if find_spec("megatron") is None:
        raise Skipped("megatron is not installed (pip install megatron-core)")
    with a_proof(bench, SMALL.build, torch.float32) as proof, _trained(bench, proof) as ranks:
        yield _adapters(proof, ranks)
        yield _whole(proof, ranks)


@contextmanager
def _trained(bench: Bench, proof: Proof) -> Iterator[Ranks]:
    """Have ranks hold the proof's models."""
    device = "cuda" if bench.device.type == "cuda" else "cpu"
    count = min(_RANKS, torch.cuda.device_count()) if device == "cuda" else _RANKS
    trainer = TrainerConfig(
        backend="megatron", ranks=count, tensor_parallel=count, device=device, dtype="float32"
    )
    # NCCL refuses the two ranks that a single GPU would have.
    config = head_config(proof.server, proof.scratch, "ranks", {"process_group": "gloo"}, trainer)
    weight_host = build_weight_host(config)
    assert weight_host is not None
    ranked = build_trainer(config, _no_base, weight_host)
    sampler = inference_sampler(config, byte_tokenizer(), weight_host)
    try:
        for name in (*SEEDS, WHOLE):
            ranked.add_model(name, None if name == WHOLE else LoraConfig(rank=RANK))
            ranked.import_state(name, proof.trainer.export_state(name))
        yield Ranks(ranked, sampler, f"{count} ranks of megatron-core (tensor parallel)")
    finally:
        proof.runner.run(sampler.close())
        ranked.close()  # type: ignore[attr-defined] # a trainer with ranks has it
        ray.shutdown()


def _no_base() -> Never:
    raise AssertionError("a head whose ranks train loads no model")


def _adapters(proof: Proof, ranks: Ranks) -> Measurement:
    for name in SEEDS:
        proof.runner.run(ranks.sampler.publish(name, ranks.trainer.publication(name)()))
    gap = proof.gap(*SEEDS, sampler=ranks.sampler)
    return Measurement(
        "S26", f"SGLang's logprobs - our torch trainer's: adapters of {ranks.how}, float32",
        largest_error(gap), "", "<= 1e-3", "<= 1e-5", f"mean {gap.mean():.1e}",
    )  # fmt: skip


def _whole(proof: Proof, ranks: Ranks) -> Measurement:
    published = ranks.trainer.publication(WHOLE)()
    before = loads_of(proof.dialect.client.url)
    proof.runner.run(ranks.sampler.publish(WHOLE, published))
    loads = loads_of(proof.dialect.client.url) - before
    gap = proof.gap(WHOLE, sampler=ranks.sampler)
    apart = proof.gap(WHOLE, against=BASE, sampler=ranks.sampler).mean()
    measured = Measurement(
        "S27", "the same, a whole model: from the ranks over a process group, bypassing the head",
        largest_error(gap), "", "<= 1e-3", "<= 1e-5", f"from the base model's {apart:.2f}",
    )  # fmt: skip
    if isinstance(published, WeightsCopy):
        return replace(measured, value=math.inf, note="it went through the head")
    return gone_by(measured, loads, "model", "group")
