"""A trainer and a sampler over one tiny base model, on a real engine thread."""

import asyncio
import os
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.device.memory import Available
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.sampler import TorchSampler
from tinkercloud_worker.torch_sampler.versions import Versions
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler
from tinkercloud_worker.training.paging import PagingPlace


@dataclass(frozen=True)
class Engine:
    """The components of a head."""

    trainer: TorchTrainer
    sampler: TorchSampler
    thread: EngineThread


def _end_the_process(error: BaseException) -> None:
    traceback.print_exception(error)
    os._exit(70)


@contextmanager
def an_engine(
    model: PreTrainedModel,
    scratch_dir: Path,
    config: SamplerConfig | None = None,
    *,
    max_sampler_bytes: int = 1 << 30,
    graph_capturer: GraphCapturer | None = None,
    available: Available = lambda: None,
    place: PagingPlace | None = None,
    max_batch_tokens: int = 256,
) -> Iterator[Engine]:
    """Start an engine over `model`; end its thread afterwards."""
    base = TorchBaseModel(model)
    thread = EngineThread(on_crash=_end_the_process)
    sampler = TorchSampler(
        base,
        byte_tokenizer(),
        config or SamplerConfig(),
        versions=Versions(scratch_dir, max_sampler_bytes, base.device, base.dtype),
        wake=thread.wake,
        graph_capturer=graph_capturer,
    )
    thread.start(sampler)
    try:
        trainer = TorchTrainerWithSampler(
            base, max_batch_tokens=max_batch_tokens, memory=ModelMemory(available, place)
        )
        yield Engine(trainer, sampler, thread)
    finally:
        thread.stop()


@asynccontextmanager
async def held(engine: Engine) -> AsyncIterator[None]:
    """Block the thread of the engine, so that requests during the block are queued together."""
    is_held, may_continue = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_continue.wait()

    holding = asyncio.create_task(engine.thread.run(lambda _: hold()))
    await asyncio.to_thread(is_held.wait)
    try:
        yield
        # Tasks created during the block have sent their requests by now.
        await asyncio.sleep(0)
    finally:
        may_continue.set()
        await holding


async def publish_adapter(engine: Engine, name: str, seed: int, rank: int = 4) -> None:
    """Publish a version with an adapter that changes the output of the model."""
    model_id = f"{name}-{seed}"
    engine.trainer.add_model(model_id, LoraConfig(rank=rank, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for tensor in held_models(engine.trainer)[model_id].trainable.tensors.values():
        tensor.detach().normal_(0, 0.1, generator=generator)
    await engine.sampler.publish(name, engine.trainer.copy_weights(model_id))


def a_sampling_request(
    prompt: list[int],
    *,
    num_samples: int = 1,
    max_tokens: int = 8,
    seed: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: StopRules | None = None,
    top_logprobs: int = 0,
    prompt_logprobs: PromptLogprobParams | None = None,
) -> SamplingRequest:
    """Return a sampling request that stops at the end token by default."""
    return SamplingRequest(
        prompt=np.asarray(prompt, dtype=np.int32),
        num_samples=num_samples,
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop if stop is not None else StopRules(frozenset({EOS_TOKEN_ID}), ()),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs or PromptLogprobParams(),
    )
