"""Builds the sampler that a configuration selects, and the engine thread.

The torch sampler alternates with training on that thread, and uses the head's copy of the base
model. Inference servers run elsewhere; those that share GPUs with the trainer alternate with it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.heads.launch import HeadConfig, InferenceConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.sampling.growing_text import decoder_of
from tinkercloud_worker.engine.sampling.sampler_interface import Sampler
from tinkercloud_worker.engine.trainer import Trainer, WeightsCopy
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground
from tinkercloud_worker.engine.turns.usage_counts import UsageMeter
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.colocation import ColocatedThread
from tinkercloud_worker.inference.dialect import Dialect
from tinkercloud_worker.inference.inference_server import InferenceServer
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import model_support
from tinkercloud_worker.inference.sglang.control import SglangControl
from tinkercloud_worker.inference.sglang.process_group import SglangGroup
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect
from tinkercloud_worker.inference.vllm import VllmDialect
from tinkercloud_worker.inference.weight_host import WeightHost
from tinkercloud_worker.inference.weights_folder import WeightsFolder
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.model.architecture import read_architecture
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.weight_files import has_weights
from tinkercloud_worker.model.weights_check import check_values, check_weights
from tinkercloud_worker.torch_sampler.sampler import TorchSampler
from tinkercloud_worker.torch_sampler.versions import Versions

OnCrash = Callable[[BaseException], None]


def check_model(config: HeadConfig) -> None:
    """Check, before loading, that inference servers compute the same model as the trainer.

    Servers load the files without checks. Trainers check the values that they load; without a
    trainer, this function checks them.

    Raises:
        UnsupportedModelError: they would compute another model; the message says what to change.
    """
    if config.sampler.backend != "torch" and has_weights(config.model.path):
        check_weights(config.model.path)
        if config.trainer.backend == "none":
            check_values(config.model.path)
    if config.sampler.backend != "torch" and config.sampler.inference.kind == "sglang":
        model_support.check_windows(config.model.path, config.limits.max_context_length)


def build_sampler(
    config: HeadConfig,
    base: Callable[[], TorchBaseModel],
    tokenizer: PreTrainedTokenizerBase,
    trainer: Trainer,
    *,
    weight_host: WeightHost,
    usage: UsageMeter,
    on_crash: OnCrash,
) -> tuple[Sampler, EngineThread]:
    """Build the sampler, and start the thread for training jobs.

    Args:
        config: the head's configuration.
        base: returns the head's copy of the base model, loaded by the first call.
        tokenizer: the model's tokenizer.
        trainer: shares its GPUs with the engines, if they are colocated.
        weight_host: sends full models to engines, unless they go in requests or by files.
        usage: counts the seconds of the thread.
        on_crash: see `EngineThread`.

    Raises:
        OSError: the file with the servers' key can't be read.
    """
    weights = dict(config.limits.owner_weights)
    if config.sampler.backend == "torch":
        thread = EngineThread(on_crash, weights=weights, usage=usage)
        sampler = TorchSampler(
            base(),
            tokenizer,
            config.sampler,
            versions=Versions(
                Path(config.scratch_dir),
                config.limits.max_sampler_bytes,
                base().device,
                base().dtype,
            ),
            wake=thread.wake,
            weights=weights,
            graph_capturer=accelerator.graph_capturer_for(base().device),
        )
        thread.start(sampler)
        return sampler, thread
    servers = inference_sampler(config, tokenizer, weight_host)
    thread = EngineThread(on_crash, weights=weights, usage=usage)
    if config.sampler.inference.colocated:
        # Free the memory that was cached while loading.
        trainer.release_memory()
        thread = ColocatedThread(
            servers.training, trainer.release_memory, on_crash, weights=weights, usage=usage
        )
    thread.start(NoBackground())
    return servers, thread


def inference_sampler(
    config: HeadConfig, tokenizer: PreTrainedTokenizerBase, weight_host: WeightHost
) -> InferenceSampler:
    """Build the sampler that uses the configured inference servers.

    Args:
        config: the head's configuration.
        tokenizer: the model's tokenizer.
        weight_host: sends full models to engines, unless they go in requests or by files.

    Raises:
        OSError: the file with the servers' key can't be read.
    """
    inference = config.sampler.inference
    owner = f"{config.head}-{config.generation}"
    local_dir = Path(inference.adapters_dir or Path(config.scratch_dir) / "adapters")
    folder = WeightsFolder(
        local_dir,
        server_dir=(
            Path(inference.adapters_dir_there or local_dir) if inference.adapters_seen else None
        ),
        owner=owner,
        base_path=Path(config.model.path),
        base_model=config.model.name,
    )
    dialects = [_dialect(config, client) for client in _clients(inference)]
    controls = {}
    if config.sampler.backend == "sglang":
        controls = {
            dialect.client.url: SglangControl(
                dialect,
                folder,
                owner=owner,
                base_path=config.model.path,
                group=_group(inference, dialect.client, weight_host),
            )
            for dialect in dialects
            if isinstance(dialect, SglangDialect)
        }
    servers = [InferenceServer(dialect, folder) for dialect in dialects]
    # vLLM's CPU kernels apply the last adapter to rows without one.
    neutral = None
    if inference.kind == "vllm":
        neutral = neutral_adapter(read_architecture(config.model.path).targets)
    unadapted = model_support.unadapted(config.model.path) if inference.kind == "sglang" else {}
    return InferenceSampler(
        servers,
        controls,
        folder,
        config.sampler,
        decode=decoder_of(tokenizer),
        neutral=neutral,
        unadapted=unadapted,
    )


def neutral_adapter(targets: Sequence[Target]) -> WeightsCopy:
    """Return an adapter that leaves the model unchanged."""
    layout = adapters.layout(targets[:1], rank=1)
    return WeightsCopy(LoraConfig(rank=1), layout.views(torch.zeros(layout.size)))


def _clients(inference: InferenceConfig) -> list[InferenceClient]:
    key = Path(inference.key_file).read_text().strip() if inference.key_file else None
    return [
        InferenceClient(url, key=key, max_concurrent=inference.max_concurrent_requests)
        for url in inference.urls
    ]


def _group(
    inference: InferenceConfig, client: InferenceClient, weight_host: WeightHost
) -> SglangGroup | None:
    if inference.process_group is None:
        return None
    return SglangGroup(client, inference.process_group, weight_host)


def _dialect(config: HeadConfig, client: InferenceClient) -> Dialect:
    inference = config.sampler.inference
    if inference.kind == "sglang":
        return SglangDialect(client)
    return VllmDialect(client, inference.model or config.model.name)
