"""The engines under test: the worker's trainers and samplers, over randomly initialized models."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.workloads import Shape
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum, ForwardBackwardRequest
from tinkercloud_worker.engine.batch import Batch, prepare
from tinkercloud_worker.engine.sampling.sampler_interface import (
    SamplingRequest,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.engine.trainer import DirectTrainer, TrainingState, WeightsCopy
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.sampler import TorchSampler
from tinkercloud_worker.torch_sampler.versions import Versions
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler

MODEL = "m"
_SAMPLER_BYTES = 8 << 30

_held: dict[tuple[str, torch.dtype], TorchBaseModel] = {}


def base_of(bench: Bench, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> TorchBaseModel:
    """Return a base model, releasing the previous one if it is different."""
    key = (shape.name, dtype)
    if key not in _held:
        release_base(bench)
        _held[key] = TorchBaseModel(shape.build(bench.device, dtype))
    return _held[key]


def release_base(bench: Bench) -> None:
    """Release the last base model."""
    _held.clear()
    bench.tidy()


def random_data(shape: Shape, lengths: Sequence[int]) -> list[Datum]:
    """Return data of random tokens."""
    rng = np.random.default_rng(0)
    return [
        Datum(
            rng.integers(0, shape.vocab_size, length).astype(np.int32),
            {"target_tokens": rng.integers(0, shape.vocab_size, length)},
        )
        for length in lengths
    ]


def a_batch(trainer: DirectTrainer, data: Sequence[Datum]) -> Batch:
    """Return data as a batch for the trainer."""
    request = ForwardBackwardRequest(
        "s:train:0", 1, tuple(data), "cross_entropy", loss_fn_config={}, forward_only=False
    )
    return prepare(request, trainer.limits)


def fill(trainer: DirectTrainer, model_id: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Set random, non-zero weights for both halves of an adapter, and return them."""
    state = trainer.export_state(model_id)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.weights.tensors.items()
    }
    trainer.import_state(model_id, TrainingState(WeightsCopy(state.weights.lora, tensors), None, 0))
    return tensors


def a_trainer(
    base: TorchBaseModel, rank: int, max_batch_tokens: int, max_kept_tokens: int | None = None
) -> TorchTrainer:
    """Return a trainer with one model, an adapter of random weights."""
    trainer = TorchTrainerWithSampler(
        base, max_batch_tokens=max_batch_tokens, max_kept_tokens=max_kept_tokens
    )
    trainer.add_model(MODEL, LoraConfig(rank=rank, seed=1))
    fill(trainer, MODEL)
    return trainer


def step(trainer: DirectTrainer, batch: Batch, model_id: str = MODEL) -> None:
    """Compute a batch's gradient and discard it."""
    trainer.forward_backward(model_id, batch)
    trainer.discard_gradient(model_id)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of a sampler; the number of sequences differs between figures."""

    max_running_sequences: int
    prefill_chunk_tokens: int = 2048
    """As many tokens as a GPU computes in about the time of launching the kernels."""
    max_cached_tokens: int = 1 << 17
    sampled_logprobs: Literal["model", "tempered"] = "model"


class RunningSampler:
    """A sampler on its engine thread."""

    def __init__(self, sampler: TorchSampler) -> None:
        self.sampler = sampler

    def publish(self, version: str, weights: WeightsCopy | None) -> None:
        """Make weights available under a new name."""
        asyncio.run(self.sampler.publish(version, weights))

    def sample(self, version: str, *requests: SamplingRequest) -> list[SamplingResult]:
        """Run concurrent requests of one version."""
        return self.sample_all([(version, request) for request in requests])

    def sample_all(self, requests: Sequence[tuple[str, SamplingRequest]]) -> list[SamplingResult]:
        """Run concurrent requests of several versions."""

        async def everything() -> list[SamplingResult]:
            return await asyncio.gather(*[self.sampler.sample(v, r) for v, r in requests])

        return asyncio.run(everything())


@contextmanager
def a_sampler(
    base: TorchBaseModel, max_running_sequences: int, graph_capturer: GraphCapturer | None
) -> Iterator[RunningSampler]:
    """Run a sampler over a base model."""
    thread = EngineThread(on_crash=lambda error: print("the engine failed:", repr(error)))
    config = Capacity(max_running_sequences)
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=Tokenizer(models.WordLevel({"?": 0})))
    with tempfile.TemporaryDirectory() as folder:
        sampler = TorchSampler(
            base,
            tokenizer,
            config,
            versions=Versions(Path(folder), _SAMPLER_BYTES, base.device),
            wake=thread.wake,
            graph_capturer=graph_capturer,
        )
        thread.start(sampler)
        try:
            yield RunningSampler(sampler)
        finally:
            thread.stop()


def a_prompt(shape: Shape, length: int, seed: int) -> list[int]:
    """Return random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, shape.vocab_size, length).tolist()
    return tokens


def a_request(prompt: Sequence[int], max_tokens: int, num_samples: int = 1) -> SamplingRequest:
    """Return a request that ends only by its length."""
    return SamplingRequest(
        np.asarray(prompt, np.int32),
        num_samples,
        max_tokens,
        seed=1,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        stop=StopRules(frozenset(), ()),
    )


def trained_logprobs(
    trainer: TorchTrainer, prompt: Sequence[int], drawn: Sequence[int], model_id: str = MODEL
) -> np.ndarray:
    """Return the trainer's logprobs of tokens sampled after a prompt."""
    ids = np.asarray([*prompt, *drawn], np.int32)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:].astype(np.int64)})
    output = trainer.forward(model_id, a_batch(trainer, [datum]))
    logprobs: np.ndarray = output.logprobs[0][len(prompt) - 1 :]
    return logprobs
