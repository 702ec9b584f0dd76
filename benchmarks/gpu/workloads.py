"""Models and batches of the benchmarks: public architectures with random weights.

The cost of a step depends on shapes, not on values, so no weights are downloaded.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel


def _modeling(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


_PLAIN = {family: dict(vars(_modeling(family))) for family in ("qwen2", "qwen3")}
"""The functions of transformers before fused kernels replace some of them."""


@contextmanager
def plain_transformers() -> Iterator[None]:
    """Build and run models with transformers' own functions in a process with fused kernels."""
    now = {family: dict(vars(_modeling(family))) for family in _PLAIN}
    for family, plain in _PLAIN.items():
        vars(_modeling(family)).update(plain)
    try:
        yield
    finally:
        for family, fused in now.items():
            vars(_modeling(family)).update(fused)


@dataclass(frozen=True)
class Shape:
    """A Qwen architecture: dense, or a mixture of experts."""

    name: str
    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    max_position_embeddings: int = 1 << 17
    experts: int = 0
    """Experts of each layer, each with `intermediate_size`; 0: none."""
    chosen: int = 1
    """Experts per token."""

    def config(self) -> PretrainedConfig:
        """Return it as Hugging Face describes it."""
        mixture = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
        }
        return AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tied,
            max_position_embeddings=self.max_position_embeddings,
            **(mixture if self.experts else {}),
        )

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Return a model of this shape with random weights, the same every time."""
        torch.manual_seed(0)
        with device:
            # transformers' own is not typed.
            build: Any = AutoModelForCausalLM.from_config
            model: PreTrainedModel = build(self.config(), dtype=dtype)
        model.train(mode=False).requires_grad_(requires_grad=False)
        return model

    @property
    def multiplied(self) -> int:
        """Number of weights in matrix products: all but the input embedding and norms."""
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size * self.chosen
        mlp += self.hidden_size * self.experts
        return self.layers * (attention + mlp) + self.hidden_size * self.vocab_size

    def training_flops(self, length: int, adapter: int) -> float:
        """Return the operations of a LoRA step per token, without recomputation.

        Args:
            length: tokens of each sequence.
            adapter: elements of the adapter.
        """
        attention = 6 * self.layers * self.heads * self.head_dim * length
        return 4 * self.multiplied + 6 * adapter + attention


def _qwen3(name: str, hidden: int, layers: int, heads: int, intermediate: int) -> Shape:
    is_small = hidden < 4096
    return Shape(name, "qwen3", hidden, layers, heads, 8, 128, intermediate, 151_936, tied=is_small)


QWEN25_05B = Shape("Qwen2.5-0.5B", "qwen2", 896, 24, 14, 2, 64, 4864, 151_936, tied=True)
QWEN3_06B = _qwen3("Qwen3-0.6B", 1024, 28, 16, 3072)
QWEN3_4B = _qwen3("Qwen3-4B", 2560, 36, 32, 9728)
QWEN3_8B = _qwen3("Qwen3-8B", 4096, 36, 32, 12288)
MIXTURE = Shape(
    "mixture", "qwen3_moe", 1024, 6, 16, 4, 64, 512, 32_768, tied=False, experts=16, chosen=4
)
QWEN3_30B_PART = Shape(
    "4 layers of Qwen3-30B-A3B", "qwen3_moe", 2048, 4, 32, 4, 128, 768, 151_936, tied=False,
    experts=128, chosen=8,
)  # fmt: skip
TINY = Shape("tiny", "qwen3", 32, 2, 4, 2, 8, 48, 264, tied=True)
TINY_MIXTURE = Shape(
    "tiny mixture", "qwen3_moe", 32, 2, 4, 2, 8, 24, 264, tied=False, experts=4, chosen=2
)


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Workload:
    """Sizes of everything that is measured."""

    checked: Shape
    """Compared with Hugging Face, in float32 too."""
    mixture: Shape
    """Also compared, with the megatron trainer."""
    decoding: Shape
    small: Shape
    middle: Shape
    large: Shape
    rank: int
    small_batch: Batch
    middle_batch: Batch
    large_batch: Batch
    tenants_batch: Batch
    """One sequence for each of several models."""
    longest_ragged: int
    """Tokens of the longest sequence of a batch of real lengths."""
    estimated: tuple[tuple[Shape, Batch], ...]
    """Micro-batches whose memory is compared with the planner's estimate."""
    filled: int
    """GPU memory in GiB for the largest planned micro-batch of the middle model."""
    contexts: tuple[int, ...]
    """Lengths to try, in increasing order."""
    head: tuple[int, int, int]
    """Positions, hidden size and vocabulary of the LM head benchmark."""
    prompt: int
    drawn: int
    """Tokens sampled per sequence."""
    together: int
    """Sequences decoded together."""
    rounds: int


WORKLOADS: Mapping[str, Workload] = {
    "full": Workload(
        checked=QWEN3_06B,
        mixture=MIXTURE,
        decoding=QWEN25_05B,
        small=QWEN3_06B,
        middle=QWEN3_4B,
        large=QWEN3_8B,
        rank=32,
        small_batch=Batch(16, 2048),
        middle_batch=Batch(8, 2048),
        large_batch=Batch(4, 4096),
        tenants_batch=Batch(8, 512),
        longest_ragged=2048,
        estimated=(
            (QWEN3_06B, Batch(16, 2048)),
            (QWEN3_4B, Batch(4, 4096)),
            (QWEN3_8B, Batch(1, 16384)),
            (QWEN3_30B_PART, Batch(8, 2048)),
        ),
        filled=22,
        contexts=(1 << 15, 1 << 16, 1 << 17),
        head=(8192, 4096, 151_936),
        prompt=128,
        drawn=64,
        together=128,
        rounds=3,
    ),
    "tiny": Workload(
        checked=TINY,
        mixture=TINY_MIXTURE,
        decoding=TINY,
        small=TINY,
        middle=TINY,
        large=TINY,
        rank=4,
        small_batch=Batch(2, 16),
        middle_batch=Batch(2, 16),
        large_batch=Batch(2, 16),
        tenants_batch=Batch(2, 8),
        longest_ragged=32,
        estimated=((TINY, Batch(2, 16)),) * 4,
        filled=22,
        contexts=(32, 64),
        head=(64, 32, 264),
        prompt=8,
        drawn=4,
        together=2,
        rounds=1,
    ),
}
