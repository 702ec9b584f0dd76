"""A real SGLang server with our client, and our trainer with the same weights."""

import asyncio
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from prometheus_client import REGISTRY
from transformers.modeling_utils import PreTrainedModel

from benchmarks.gpu.bench import SGLANG_PYTHON, Bench, Skipped
from benchmarks.gpu.engines import (
    RunningSampler,
    a_prompt,
    a_request,
    a_sampler,
    fill,
    trained_logprobs,
)
from benchmarks.gpu.sglang_checks.sglang_server import Server, a_server
from benchmarks.gpu.workloads import Shape
from benchmarks.shared.measuring import Measurement
from tinkercloud_operator.children.pods import Json
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.resources.sessions import ENGINES
from tinkercloud_testing.small_models.models import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    tiny_deepseek_v3,
)
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.engine.sampling.sampler_interface import (
    SamplingRequest,
    SamplingResult,
)
from tinkercloud_worker.engine.trainer import TrainingState, WeightsCopy
from tinkercloud_worker.inference.client import InferenceClient
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import engine_adapters as sglang_adapters
from tinkercloud_worker.inference.sglang import weights as sglang_weights
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect
from tinkercloud_worker.inference.weight_host import HeadWeightHost
from tinkercloud_worker.metrics import Way, What
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

SHAPE = Shape("small", "llama", 1024, 8, 16, 8, 64, 3072, VOCAB_SIZE, tied=False)
SMALL = Shape("smaller", "llama", 64, 2, 4, 2, 16, 128, VOCAB_SIZE, tied=False)
"""For a CPU, where interpreting kernels is slow."""
WIDE = Shape("wider", "llama", 256, 2, 4, 4, 64, 2048, VOCAB_SIZE, tied=False)
"""For a CPU, for figures that measure memory."""
MIXTURE = replace(SMALL, name="small mixture", family="qwen3_moe", experts=4, chosen=2)
RANK = 16
SEEDS = {"one": 1, "two": 2}
"""Adapters and the seeds of their weights."""
BASE = "base"
"""The trainer's model that equals the base model: an adapter without effect."""
VERSIONS = (BASE, *SEEDS)
OUTSIDE_EXPERTS = ("o_proj", "lm_head")
"""Modules that adapters may cover if experts will be replaced."""
DRAWN = 6
_PROMPT = 20
_LATENT = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    # SGLang's kernels support two sizes of cached state per token: 512 + 64, and these.
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    # On a CPU SGLang multiplies by it twice.
    "routed_scaling_factor": 1.0,
    # Published configurations set this field, which transformers omits.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

Build = Callable[[torch.device, torch.dtype], PreTrainedModel]
Loads = Counter[tuple[What, Way]]
"""Number of loads into a server by kind of weights and transfer path."""


@dataclass
class Proof:
    """A server, its client samplers, and the reference for its results."""

    sampler: InferenceSampler
    """Sends weights in requests."""
    reader: InferenceSampler
    """The sampler of another head; the server reads weights from files."""
    joined: InferenceSampler
    """The sampler of a third head, which sends full models over a process group."""
    server: Server
    dialect: SglangDialect
    """For requests that samplers do not send."""
    scratch: Path
    reference: RunningSampler
    trainer: TorchTrainer
    runner: asyncio.Runner
    versions: tuple[str, ...]
    """The versions published at the start."""
    loads: Loads = field(default_factory=Counter)
    """Loads of the versions published at the start."""

    def publish(self, *models: str, sampler: InferenceSampler | None = None) -> Loads:
        """Publish the trainer's weights of models under their own names, and return the loads."""
        url = self.dialect.client.url
        before = loads_of(url)
        for model in models:
            weights = self.trainer.copy_weights(model) if model != BASE else None
            self.runner.run((sampler or self.sampler).publish(model, weights))
        return loads_of(url) - before

    def sample(
        self, *asked: tuple[str, SamplingRequest], sampler: InferenceSampler | None = None
    ) -> list[SamplingResult]:
        """Run concurrent requests, each with its version."""
        asking = sampler or self.sampler

        async def everything() -> list[SamplingResult]:
            return await asyncio.gather(*[asking.sample(*each) for each in asked])

        return self.runner.run(everything())

    def gap(
        self, *versions: str, against: str | None = None, sampler: InferenceSampler | None = None
    ) -> np.ndarray:
        """Return the difference of sampled tokens' logprobs from the trainer's.

        Args:
            versions: versions that are sampled concurrently.
            against: the trainer's model to compare with; None for that of the version's name.
            sampler: the client; None for the one that sends weights in requests.
        """
        prompts = [prompt(seed) for seed in range(len(versions))]
        asked = [
            (version, a_request(tokens, DRAWN, num_samples=2))
            for version, tokens in zip(versions, prompts, strict=True)
        ]
        results = self.sample(*asked, sampler=sampler)
        return np.concatenate(
            [
                np.abs(
                    trained_logprobs(self.trainer, tokens, s.tokens, against or model)
                    - np.asarray(s.logprobs)
                )
                for model, tokens, result in zip(versions, prompts, results, strict=True)
                for s in result.sequences
            ]
        )


def loads_of(url: str) -> Loads:
    """Return the loads into a server from this process so far, from metrics."""
    found: Loads = Counter()
    for what, way in product(get_args(What), get_args(Way)):
        labels = {"engine": url, "what": what, "way": way}
        loads = REGISTRY.get_sample_value("tinkercloud_engine_load_seconds_count", labels)
        found[what, way] = int(loads or 0)
    return found


def gone_by(figure: Measurement, loads: Loads, what: What, way: Way) -> Measurement:
    """Return a figure about a transfer path; infinity unless all weights of the kind used it."""
    ways = sorted(each for kind, each in loads if kind == what)
    if ways == [way]:
        return figure
    note = f"used another path than {way}: {', '.join(ways) or 'none'}"
    return replace(figure, value=math.inf, note=note)


def prompt(seed: int, length: int = _PROMPT) -> list[int]:
    """Return random tokens, none of them the one that ends a text."""
    return [token for token in a_prompt(SHAPE, length, seed) if token != EOS_TOKEN_ID]


def latent(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a small DeepSeek-V3 with random weights."""
    model = tiny_deepseek_v3(**_LATENT)
    model.train(mode=False).requires_grad_(requires_grad=False)
    # transformers' own is not typed.
    torch.nn.Module.to(model, device=device, dtype=dtype)
    return model


@contextmanager
def a_proof(
    bench: Bench,
    build: Build,
    dtype: torch.dtype,
    *,
    sampler: Json = ENGINES,
    modules: Sequence[str] = (),
    ranks: int = 1,
) -> Iterator[Proof]:
    """Run a server of the base model, with adapters published to it.

    Args:
        bench: to measure on.
        build: makes the base model.
        dtype: of its weights.
        sampler: a BaseModel's, whose engine the server is.
        modules: modules that adapters may cover, in which case none is published; all by default.
        ranks: of the server.

    Raises:
        Skipped: there is no SGLang.
    """
    if SGLANG_PYTHON not in os.environ and find_spec("sglang") is None:
        raise Skipped(f"sglang is not installed (pip install sglang, or set {SGLANG_PYTHON})")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = TorchBaseModel(_saved(build(bench.device, dtype), folder / "model"))
        server = stack.enter_context(
            a_server(
                folder / "model",
                folder,
                device=bench.device,
                dtype=str(dtype).removeprefix("torch."),
                max_lora_rank=RANK,
                sampler=_engines_of(sampler, modules, ranks),
            )
        )
        reference = stack.enter_context(a_sampler(base, 4, graph_capturer=None))
        runner = stack.enter_context(asyncio.Runner())
        colocated = {"colocated": sampler.get("colocated", False)}
        sender = _sampler(server, folder, "sent", colocated)
        with (
            patch.object(sglang_adapters, "_MAX_SENT_BYTES", 0),
            patch.object(sglang_weights, "_MAX_SENT_BYTES", 0),
        ):
            reader = _sampler(server, folder, "read", colocated)
        # NCCL refuses the two ranks that a single GPU would have.
        joined = _sampler(server, folder, "joined", {"process_group": "gloo"})
        dialect = SglangDialect(
            InferenceClient(server.url, key=server.key_file.read_text(), max_concurrent=8)
        )
        samplers = (sender, reader, joined)
        for closing in (*samplers, dialect.client):
            stack.callback(_run, runner, closing.close)
        versions = (BASE,) if modules else VERSIONS
        trainer = _trainer(base)
        proof = Proof(*samplers, server, dialect, folder, reference, trainer, runner, versions)
        proof.loads = proof.publish(*versions)
        yield proof


def _engines_of(sampler: Json, modules: Sequence[str], ranks: int) -> Json:
    targets = {"loraTargetModules": [*modules]} if modules else {}
    return {**sampler, "engines": {**sampler["engines"], **targets}, "gpusPerReplica": ranks}


def _run(runner: asyncio.Runner, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    runner.run(work())


def _saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write a model with a tokenizer as the server reads it, and return it."""
    model.config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def _trainer(base: TorchBaseModel) -> TorchTrainer:
    """Return a trainer with the base, two adapters, one with too high a rank, and a full model."""
    trainer = TorchTrainer(base, max_batch_tokens=1024)
    trainer.add_model(BASE, LoraConfig(rank=RANK, seed=1))
    for name, seed in SEEDS.items():
        trainer.add_model(name, LoraConfig(rank=RANK, seed=seed))
        fill(trainer, name, seed)
    trainer.add_model("large", LoraConfig(rank=2 * RANK, seed=1))
    trainer.add_model("whole", None)
    tensors = trainer.export_state("whole").weights.tensors
    # Each row and each expert differs, so that a mix-up is detected.
    changed = {name: tensor * _apart(tensor) for name, tensor in tensors.items()}
    trainer.import_state("whole", TrainingState(WeightsCopy(None, changed), None, 0))
    return trainer


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a different factor for each index of a tensor's first dimension."""
    others = [1] * (tensor.ndim - 1)
    return torch.linspace(0.5, 2, len(tensor)).view(-1, *others).to(tensor)


def _sampler(
    server: Server, folder: Path, name: str, fields: Mapping[str, Any]
) -> InferenceSampler:
    """Return the sampler of a head, which trains by itself; see `head_config`."""
    config = head_config(server, folder, name, fields, TrainerConfig())
    return inference_sampler(config, byte_tokenizer(), HeadWeightHost())


def head_config(
    server: Server, folder: Path, name: str, fields: Mapping[str, Any], trainer: TrainerConfig
) -> HeadConfig:
    """Return the configuration of a head, with a weights folder of the same name.

    Args:
        server: the inference server.
        folder: the parent folder of the model and the weights.
        name: of the head.
        fields: other fields of its InferenceConfig.
        trainer: its trainer.
    """
    inference = InferenceConfig(
        urls=(server.url,),
        key_file=str(server.key_file),
        adapters_dir=str(folder / name),
        **fields,
    )
    return HeadConfig(
        head=name,
        generation="g1",
        model=BaseModelSource(name=SHAPE.name, path=str(folder / "model")),
        token_file="",
        checkpoint_root="",
        scratch_dir=str(folder),
        trainer=trainer,
        sampler=SamplerConfig(backend="sglang", inference=inference),
    )
