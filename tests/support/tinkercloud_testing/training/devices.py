"""Runs the same training and sampling on a device, and returns numbers to compare."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine
from tinkercloud_worker.checkpoints.formats import encode_tensors
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.sampling.sampler_interface import PromptLogprobParams, SamplingResult
from tinkercloud_worker.engine.trainer import WeightsCopy

Numbers = dict[str, npt.NDArray[np.float64]]


def trained_and_sampled(where: str, scratch_dir: Path) -> Numbers:
    """Train adapters and a full model, move their state, sample; return the results.

    Args:
        where: the name of the device.
        scratch_dir: an empty folder.
    """
    if where == "elsewhere":
        # It becomes the accelerator of the process, which must have been started for this.
        import tinkercloud_testing.training.elsewhere  # noqa: F401, PLC0415
    model = tiny_llama()
    torch.nn.Module.to(model, torch.device(where))
    with an_engine(model, scratch_dir, max_sampler_bytes=0) as engine:
        adapter = _train(engine, "adapter", LoraConfig(rank=4, seed=1), "cross_entropy")
        policy = _train(engine, "policy", LoraConfig(rank=2, seed=2), "ppo")
        whole = _train(engine, "whole", None, "cross_entropy")
        return {**adapter, **policy, **whole, **asyncio.run(_sample(engine))}


def _train(engine: Engine, name: str, config: LoraConfig | None, loss_fn: str) -> Numbers:
    """Train three steps, the last one from exported and imported state."""
    trainer = engine.trainer
    data = random_data([5, 40, 9, 40], policy=loss_fn == "ppo")
    batch = prepare(a_request(data, loss_fn), trainer.limits)
    trainer.add_model(name, config)
    losses, norms = [], []
    for step in range(3):
        output = trainer.forward_backward(name, batch)
        gradient = trainer.export_gradient(name)
        if step == 1 and gradient is not None:
            state = trainer.export_state(name)
            trainer.add_model(name, config)
            trainer.import_state(name, state)
            trainer.import_gradient(name, gradient)
        norms.append(trainer.optim_step(name, AdamParams(learning_rate=1e-2))["grad_norm"])
        losses.append(output.metrics["loss:sum"])
    logprobs = np.concatenate(trainer.forward(name, batch).logprobs)
    return {
        f"{name} losses": np.asarray(losses),
        f"{name} gradients": np.asarray(norms),
        f"{name} logprobs": logprobs.astype(np.float64),
    }


async def _sample(engine: Engine) -> Numbers:
    """Sample from the base, a trained adapter, and an adapter read from a file."""
    sampler = engine.sampler
    trained = engine.trainer.copy_weights("adapter")
    read = WeightsCopy(trained.lora, load(encode_tensors(trained.tensors)))
    await sampler.publish("base", None)
    await sampler.publish("trained", trained)
    await sampler.publish("read", read)
    asked = PromptLogprobParams(
        logprobs_from=2, top_k=2, targets=np.array([[3], [-1], [5]]), alternatives_k=2
    )
    request = a_sampling_request(
        [1, 2, 3, 4],
        num_samples=2,
        top_k=20,
        top_p=0.9,
        top_logprobs=2,
        prompt_logprobs=asked,
    )
    results = await asyncio.gather(
        *(sampler.sample(version, request) for version in ("base", "trained", "read"))
    )
    return {
        f"{version} {what}": values
        for version, result in zip(("base", "trained", "read"), results, strict=True)
        for what, values in _drawn(result).items()
    }


def _drawn(result: SamplingResult) -> Numbers:
    prompt = result.prompt
    assert prompt.logprobs is not None
    assert prompt.top is not None
    assert prompt.targets is not None
    tokens = [token for sequence in result.sequences for token in sequence.tokens]
    logprobs = [value for sequence in result.sequences for value in sequence.logprobs]
    return {
        "tokens": np.asarray(tokens, np.float64),
        "logprobs": np.asarray(logprobs, np.float64),
        "prompt": np.nan_to_num(prompt.logprobs.astype(np.float64)),
        "most likely": prompt.top.token_ids.astype(np.float64),
        "targets": np.nan_to_num(prompt.targets.astype(np.float64)),
    }
