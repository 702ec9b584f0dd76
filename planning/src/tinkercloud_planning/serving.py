"""Plans for `tinkercloud serve`: one process trains and samples on one GPU, with one base model."""

from dataclasses import dataclass, replace

from tinkercloud_crds.pods.shapes import MAX_TOKENS
from tinkercloud_planning.activations import SEPARATE
from tinkercloud_planning.gpus import MEMORY_GIB, Fleet, Gpu, gpu
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import GpuMemory, largest_micro_batch, training
from tinkercloud_planning.refusal import DoesNotFit, describe, gib
from tinkercloud_planning.search import MICRO_BATCH_CAP, Demand

_MOST_CACHED_TOKENS = 131_072
"""Default of `TINKERCLOUD_SAMPLER__MAX_CACHED_TOKENS`."""
_CACHES = 1.5
"""Keys and values that the torch sampler may hold, relative to `max_cached_tokens`: a quarter more
for waiting prompts, and a quarter for recent ones."""
_SAMPLED_COPIES = 1.5
"""Trained state in training and sampling, relative to training alone: of 16 bytes a parameter, 4
more as published for sampling, and 4 more in the memory of captured decoding steps."""
_KEY_VALUE_BYTES = 2
_ROUNDING = 256
_SHORTEST_SEQUENCE = 512


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """How `tinkercloud serve` trains and samples a model on one GPU."""

    demand: Demand
    gpu: Gpu
    tokens: int
    """Maximum number of tokens of a micro-batch."""
    cached_tokens: int
    """Capacity of the key-value cache, in tokens."""
    memory: GpuMemory
    """Memory of the GPU in a training step, while the cache is full."""

    def settings(self) -> dict[str, str]:
        """Return the environment variables of the server."""
        return {
            "TINKERCLOUD_TRAINER__DEVICE": "cuda",
            "TINKERCLOUD_TRAINER__DTYPE": "bfloat16",
            "TINKERCLOUD_TRAINER__MAX_BATCH_TOKENS": str(self.tokens),
            "TINKERCLOUD_TRAINER__MAX_KEPT_TOKENS": "0",
            "TINKERCLOUD_SAMPLER__MAX_CACHED_TOKENS": str(self.cached_tokens),
            "TINKERCLOUD_LIMITS__MAX_LORA_RANK": str(self.demand.sampled_rank),
            "TINKERCLOUD_LIMITS__MAX_CONTEXT_LENGTH": str(self.demand.sequence_length),
        }


def plan_serving(demand: Demand, kind: Gpu) -> ServingPlan:
    """Return how to serve a model on one GPU, whose base training and sampling share.

    Half of the memory that the model leaves is for keys and values, as far as a cache of the
    default size needs it; a cache holds one sequence at least. The rest is for a micro-batch.

    Raises:
        DoesNotFit: There is no plan; the message says what would fit.
    """
    if demand.lora_rank is None:
        raise DoesNotFit("full fine-tuning with --serve: only adapters are planned for one GPU")
    if not 16 <= demand.sequence_length <= min(demand.architecture.max_context_length, MAX_TOKENS):
        raise DoesNotFit(
            f"sequence_length: {demand.sequence_length}; this model accepts 16 to"
            f" {demand.architecture.max_context_length} tokens"
        )
    if found := _serving(demand, kind):
        return found
    least = _memory(demand, kind, _least_tokens(demand), demand.sequence_length)
    raise DoesNotFit(
        f"LoRA of rank {demand.lora_rank} of this model ({demand.architecture.model_type},"
        f" {demand.architecture.parameters / 1e9:.1f}B parameters) with sequences of"
        f" {demand.sequence_length} tokens cannot be served on 1x{kind.name}, which has"
        f" {gib(kind.memory)}: it would need {gib(least.total)} ({describe(least)})."
        f" {_remedy(demand, kind)}"
    )


def serving_advice(demand: Demand, fleet: Fleet) -> str:
    """Return what a refusal says of `--serve`; empty if it would not fit either."""
    if fleet.count > 1 or demand.lora_rank is None:
        return ""
    if _serving(demand, fleet.gpu):
        return " --serve needs less: one process trains and samples with one copy of the model."
    length = _longest_sequence(demand, fleet.gpu)
    return f" With --serve, sequences of {length} tokens would fit." if length else ""


def _serving(demand: Demand, kind: Gpu) -> ServingPlan | None:
    model_alone = _memory(demand, kind, 0, 0)
    room = kind.memory - model_alone.total
    half = int(room / 2 / _CACHES / _cached_bytes(demand))
    cached = max(demand.sequence_length, min(half, _MOST_CACHED_TOKENS))
    for size in (cached, demand.sequence_length):
        kept = _memory(demand, kind, 0, size)
        available = kind.memory - kept.kv_cache - kept.reserve - kept.neighbour
        fits = largest_micro_batch(
            demand.architecture,
            Layout(),
            available=available,
            lora_rank=demand.lora_rank,
            kernels=SEPARATE,
            models=demand.slots,
        )
        tokens = min(fits // _ROUNDING * _ROUNDING, max(MICRO_BATCH_CAP, _least_tokens(demand)))
        if tokens >= _least_tokens(demand):
            memory = _memory(demand, kind, tokens, size)
            return ServingPlan(demand, kind, tokens, size, memory)
    return None


def _memory(demand: Demand, kind: Gpu, tokens: int, cached: int) -> GpuMemory:
    """Return the memory of training and sampling together."""
    memory = training(
        demand.architecture,
        Layout(),
        tokens=tokens,
        lora_rank=demand.lora_rank,
        kernels=SEPARATE,
        models=demand.slots,
        reserve=kind.contexts(1),
    )
    sampled = int((_SAMPLED_COPIES - 1) * memory.trained)
    return replace(
        memory, kv_cache=int(_CACHES * cached * _cached_bytes(demand)), neighbour=sampled
    )


def _cached_bytes(demand: Demand) -> int:
    """Return the bytes of a token's keys and values, which this sampler never compresses."""
    model = demand.architecture
    return model.layers * model.computed.heads * model.computed.width * _KEY_VALUE_BYTES


def _least_tokens(demand: Demand) -> int:
    return demand.least_tokens(Layout())


def _remedy(demand: Demand, kind: Gpu) -> str:
    larger = [gpu(name) for name in MEMORY_GIB if gpu(name).memory > kind.memory]
    would = [f"1x{other.name}" for other in larger if _serving(demand, other)][:1]
    if length := _longest_sequence(demand, kind):
        would.append(f"sequences of {length} tokens")
    if not would:
        return "No known GPU is large enough: plan several for Kubernetes, without --serve."
    return f"What would fit: {'; '.join(would)}."


def _longest_sequence(demand: Demand, kind: Gpu) -> int | None:
    length = demand.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if _serving(replace(demand, sequence_length=length), kind):
            return length
        length //= 2
    return None
