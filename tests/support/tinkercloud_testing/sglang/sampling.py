"""A sampler over fake SGLang engines, and comparisons for tests."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import REGISTRY

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.sglang.engine import FakeSglang
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingResult, StopRules
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.inference.inference_server import InferenceServer
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.weight_host import HeadWeightHost, WeightHost

MODEL = "tiny/llama"
NEVER = StopRules(frozenset(), ())
TENSORS, FILES = "/load_lora_adapter_from_tensors", "/load_lora_adapter"
WHOLE, FOLDER = "/update_weights_from_tensor", "/update_weights_from_disk"
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9, 8, 7, 6, 5, 4]]


def counted(fake: FakeSglang, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tinkercloud_engine_{name}", {"engine": fake.url, **labels})


def a_sampler(
    fakes: list[FakeSglang],
    folder: Path,
    generation: str = "g1",
    weight_host: WeightHost | None = None,
    **options: Any,
) -> InferenceSampler:
    urls = tuple(fake.url for fake in fakes)
    inference = InferenceConfig(urls=urls, **{"recovery_seconds": 60.0, **options})
    config = HeadConfig(
        head="tiny",
        generation=generation,
        model=BaseModelSource(name=MODEL, path=str(fakes[0].model_path)),
        token_file="",
        checkpoint_root="",
        scratch_dir=str(folder / "scratch"),
        sampler=SamplerConfig(backend="sglang", inference=inference),
    )
    return inference_sampler(config, byte_tokenizer(), weight_host or HeadWeightHost())


def an_adapter(engine: Engine, seed: int) -> WeightsCopy:
    """Return an adapter that changes the output of the model."""
    name = f"model-{seed}"
    engine.trainer.add_model(name, LoraConfig(rank=4, seed=seed))
    weights = engine.trainer.copy_weights(name)
    for tensor in weights.tensors.values():
        tensor.normal_(0, 0.1)
    return weights


def a_whole_model(engine: Engine, scale: float) -> WeightsCopy:
    """Return a full model: the base with a scaled output embedding."""
    engine.trainer.add_model(f"whole-{scale}", None)
    weights = engine.trainer.copy_weights(f"whole-{scale}")
    weights.tensors["lm_head.weight"].mul_(scale)
    return weights


def in_two_dtypes(model: WeightsCopy) -> WeightsCopy:
    """Return a full model with one of its norms in bfloat16."""
    name = "model.norm.weight"
    norm = model.tensors[name].to(torch.bfloat16)
    return replace(model, tensors={**model.tensors, name: norm})


def children_running(module: str) -> list[int]:
    """Return the children of this process that run a module."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pids in children for pid in pids}
    return [int(pid) for pid, command in commands.items() if module in command]


async def publish(
    engine: Engine, sampler: InferenceSampler, name: str, weights: WeightsCopy | None
) -> None:
    """Publish weights to the torch sampler and the engines."""
    await engine.sampler.publish(name, weights)
    await sampler.publish(name, weights)


async def assert_sampled(engine: Engine, sampler: InferenceSampler, version: str) -> None:
    """Sample a version at the engines and with the torch sampler, and compare."""
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    theirs = await sampler.sample(version, request)
    assert_same(theirs, await engine.sampler.sample(version, request))


def assert_same(theirs: SamplingResult, ours: SamplingResult) -> None:
    """Compare sequences and prompt scores."""
    for their, our in zip(theirs.sequences, ours.sequences, strict=True):
        assert list(their.tokens) == list(our.tokens)
        assert their.stopped == our.stopped
        np.testing.assert_allclose(their.logprobs, our.logprobs, atol=1e-5)
        if our.top is not None:
            assert their.top is not None
            assert (their.top.token_ids == our.top.token_ids).all()
    for name in ("logprobs", "targets"):
        their, our = getattr(theirs.prompt, name), getattr(ours.prompt, name)
        assert (their is None) == (our is None)
        if our is not None:
            np.testing.assert_allclose(their, our, atol=1e-5)
    if ours.prompt.top is not None:
        assert theirs.prompt.top is not None
        assert (theirs.prompt.top.token_ids == ours.prompt.top.token_ids).all()
        np.testing.assert_allclose(theirs.prompt.top.logprobs, ours.prompt.top.logprobs, atol=1e-5)


async def cleaned_up(sampler: InferenceSampler) -> None:
    """Wait until retired versions have been removed from the engines."""
    await asyncio.gather(*sampler._cleaning)


def servers_of(sampler: InferenceSampler) -> Mapping[str, InferenceServer]:
    """Return a sampler's side of its engines, by URL."""
    return sampler._servers
