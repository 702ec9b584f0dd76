"""The search for the best way to train and sample a model on the given GPUs.

The rules, in order of priority: trainer and sampler have GPUs of their own if possible; a copy of
the model spans as few GPUs as possible, so that the others process more data; and the layout
prefers parallelism with less communication (tensor within a node, then pipeline, then context;
expert parallelism adds no ranks). Engines over several nodes, which sessions cannot have, are the
last resort. docs/operate/planning.md explains the rules.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tinkercloud_crds.pods.shapes import MAX_ENGINES, MAX_REPLICAS, MAX_TOKENS
from tinkercloud_planning.activations import FUSED, SEPARATE, Kernels
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.gpus import Fleet, Gpu
from tinkercloud_planning.layouts import Layout, engine_sizes, layouts, pod_size
from tinkercloud_planning.memory import (
    GpuMemory,
    adapter_slots,
    kv_bytes_per_token,
    largest_micro_batch,
    sampling,
    training,
)

MICRO_BATCH_CAP = 1 << 16
"""Number of tokens beyond which larger micro-batches are not faster."""
SMALL_MICRO_BATCH = 4096
"""Number of tokens below which a GPU is limited by memory bandwidth."""
FEW_SEQUENCES = 8
"""Number of sequences of full length below which an engine decodes too few tokens at a time."""
_MICRO_BATCH_ROUNDING = 256
_MOST_NODES_PER_ENGINE = 8


@dataclass(frozen=True, slots=True)
class Demand:
    """What sessions do with a model."""

    architecture: Architecture
    sequence_length: int
    """Maximum length of trained and sampled sequences, in tokens."""
    lora_rank: int | None
    """Maximum rank of an adapter; None for full fine-tuning."""
    slots: int = 1
    """Number of adapters that share the trainer: the sessions of a pool on one cluster."""

    @property
    def sampled_rank(self) -> int:
        """Maximum rank that engines reserve memory for, which is 1 for full fine-tuning."""
        return self.lora_rank or 1

    def least_tokens(self, layout: Layout) -> int:
        """Return the tokens of the smallest micro-batch that holds the longest sequence."""
        return _rounded_up(self.sequence_length, layout)

    def most_tokens(self, layout: Layout) -> int:
        """Return the size of the largest useful micro-batch, in tokens."""
        longest = _rounded_up(self.architecture.max_context_length, layout)
        return min(max(MICRO_BATCH_CAP, longest), MAX_TOKENS)

    @property
    def kernels(self) -> Kernels:
        """Kernels of the trainer that trains the model, in the image for NVIDIA GPUs."""
        model = self.architecture
        return FUSED if model.only_torch and model.has_fused_kernels else SEPARATE

    def training(self, layout: Layout, tokens: int, *, reserve: int, neighbour: int) -> GpuMemory:
        """Return the estimate of `memory.training` for this demand."""
        return training(
            self.architecture,
            layout,
            tokens=tokens,
            lora_rank=self.lora_rank,
            kernels=self.kernels,
            models=self.slots,
            reserve=reserve,
            neighbour=neighbour,
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that shares a trainer's GPUs."""

    gpus: int
    """Number of GPUs that it spans."""
    lora_rank: int
    """Maximum rank of the adapters that it accepts."""

    def kept(self, architecture: Architecture) -> int:
        """Return the bytes per GPU that it does not release while the trainer computes."""
        return adapter_slots(architecture, self.gpus, self.lora_rank)


@dataclass(frozen=True, slots=True)
class Trainer:
    """How a model is trained."""

    layout: Layout
    gpus_per_pod: int
    tokens: int
    """Maximum number of tokens per micro-batch on one data-parallel rank."""
    memory: GpuMemory
    """Peak memory during a step on the fullest GPU."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a model is sampled."""

    engines: int
    tensor: int
    """Number of GPUs per engine."""
    memory: GpuMemory
    """Memory of each of its GPUs."""
    tokens: int
    """Number of tokens whose keys and values fit in one engine's cache."""
    sequences: int
    """Number of sequences of full length that fit in one engine's cache."""


@dataclass(frozen=True, slots=True)
class Division:
    """A trainer and a sampler."""

    trainer: Trainer
    sampler: Sampler | None
    """None if all GPUs train."""
    colocated: bool
    """Whether they take turns on all GPUs instead of having GPUs of their own."""


def divide(demand: Demand, fleet: Fleet) -> Division | None:
    """Return the best use of all GPUs, or None if there is none."""
    return (
        next(_separate(demand, fleet, best_sampler), None)
        or min(_colocated(demand, fleet), key=_preferred_together, default=None)
        or next(_separate(demand, fleet, _sampler_over_nodes), None)
    )


def best_trainer(demand: Demand, fleet: Fleet, *, engine: Engine | None) -> Trainer | None:
    """Return the best way to train on all GPUs, or None if there is none.

    Args:
        demand: What to train.
        fleet: The GPUs; all GPUs of a node belong to one pod.
        engine: The engine on each of them, if they are shared.
    """
    return next(_trainers(demand, fleet, fleet.count, engine=engine), None)


def _separate(
    demand: Demand, fleet: Fleet, samplers: Callable[[Demand, Fleet, int], Sampler | None]
) -> Iterator[Division]:
    """Yield trainers and samplers on separate GPUs: halves first, and only whole nodes."""
    unit = fleet.per_node if fleet.count > fleet.per_node else 1
    counts = range(unit, fleet.count, unit)
    for count in sorted(counts, key=lambda count: (abs(2 * count - fleet.count), -count)):
        sampler = samplers(demand, fleet, fleet.count - count)
        trainer = next(_trainers(demand, fleet, count, engine=None), None) if sampler else None
        if trainer and sampler:
            yield Division(trainer, sampler, colocated=False)


def _colocated(demand: Demand, fleet: Fleet) -> Iterator[Division]:
    """Yield trainers and samplers that fit together on all GPUs."""
    for tensor in _engine_sizes(demand, fleet, fleet.count):
        engine = Engine(tensor, demand.sampled_rank)
        for trainer in _trainers(demand, fleet, fleet.count, engine=engine):
            sampler = _sampler(demand, fleet, fleet.count // tensor, tensor, trainer)
            if sampler.sequences:
                yield Division(trainer, sampler, colocated=True)


def _preferred_together(division: Division) -> tuple[int, ...]:
    trainer, sampler = division.trainer, division.sampler
    few, tensor = _fewest_gpus(sampler) if sampler else (True, 0)
    return few, *_preference((trainer.layout, trainer.tokens)), tensor


def _trainers(
    demand: Demand, fleet: Fleet, gpus: int, *, engine: Engine | None
) -> Iterator[Trainer]:
    """Yield the ways to train on so many GPUs, best first.

    Args:
        demand: What to train.
        fleet: Type and nodes of the GPUs.
        gpus: Number of GPUs that train.
        engine: The engine on each of them, if they are shared.
    """
    model, reserve = demand.architecture, fleet.gpu.contexts(2 if engine else 1)
    kept = engine.kept(model) if engine else 0
    pod = pod_size(gpus, fleet.per_node)
    if gpus // pod > MAX_REPLICAS:
        return
    fitting = [
        (layout, tokens)
        for layout in layouts(model, gpus, pod)
        if (tokens := micro_batch_tokens(demand, layout, fleet.gpu.memory - reserve - kept))
        is not None
    ]
    for layout, tokens in sorted(fitting, key=_preference):
        memory = demand.training(layout, tokens, reserve=reserve, neighbour=kept)
        yield Trainer(layout, pod, tokens, memory)


def _preference(candidate: tuple[Layout, int]) -> tuple[int, ...]:
    layout, tokens = candidate
    return (
        tokens < SMALL_MICRO_BATCH,
        layout.ways,
        layout.context,
        layout.pipeline,
        layout.tensor,
        layout.expert,
    )


def micro_batch_tokens(demand: Demand, layout: Layout, available: int) -> int | None:
    """Return the size of a micro-batch in tokens, or None if the longest sequence does not fit.

    Args:
        demand: What to train.
        layout: How the model is divided.
        available: Available bytes per GPU.
    """
    largest = largest_micro_batch(
        demand.architecture,
        layout,
        available=available,
        lora_rank=demand.lora_rank,
        kernels=demand.kernels,
        models=demand.slots,
    )
    tokens = min(
        largest // _MICRO_BATCH_ROUNDING * _MICRO_BATCH_ROUNDING, demand.most_tokens(layout)
    )
    return tokens if tokens >= demand.least_tokens(layout) else None


def _rounded_up(tokens: int, layout: Layout) -> int:
    computed = -(-tokens // layout.multiple) * layout.multiple
    return -(-computed // _MICRO_BATCH_ROUNDING) * _MICRO_BATCH_ROUNDING


def best_sampler(demand: Demand, fleet: Fleet, gpus: int) -> Sampler | None:
    """Return the best way to sample on GPUs that are not shared, or None if there is none.

    Args:
        demand: What to sample.
        fleet: Type and nodes of the GPUs.
        gpus: Number of GPUs that sample.
    """
    return _best(demand, fleet, gpus, _engine_sizes(demand, fleet, gpus))


def smallest_engine(demand: Demand, fleet: Fleet) -> Sampler | None:
    """Return the smallest engine of such GPUs, on one or several nodes; None if none is enough.

    Args:
        demand: What to sample.
        fleet: Type of the GPUs, and their number per node.
    """
    model, node = demand.architecture, fleet.per_node
    spans = [node * nodes for nodes in range(2, _MOST_NODES_PER_ENGINE + 1)]
    sizes = engine_sizes(model, node) + [s for s in spans if s in engine_sizes(model, s)]
    engines = (_sampler(demand, fleet, 1, tensor, None) for tensor in sizes)
    return min((e for e in engines if e.sequences), key=_fewest_gpus, default=None)


def _sampler_over_nodes(demand: Demand, fleet: Fleet, gpus: int) -> Sampler | None:
    """Return engines that span several whole nodes; servers like these take adapters only."""
    node = fleet.per_node
    sizes = [
        tensor
        for tensor in engine_sizes(demand.architecture, gpus)
        if node < tensor <= node * _MOST_NODES_PER_ENGINE
        and not tensor % node
        and gpus // tensor <= MAX_ENGINES
    ]
    return _best(demand, fleet, gpus, sizes if demand.lora_rank else [])


def _best(demand: Demand, fleet: Fleet, gpus: int, sizes: list[int]) -> Sampler | None:
    engines = (_sampler(demand, fleet, gpus // tensor, tensor, None) for tensor in sizes)
    return min((e for e in engines if e.sequences), key=_fewest_gpus, default=None)


def _fewest_gpus(sampler: Sampler) -> tuple[bool, int]:
    return sampler.sequences < FEW_SEQUENCES, sampler.tensor


def can_sample(demand: Demand, gpu: Gpu, gpus: int) -> bool:
    """Return whether an engine holds a model and one longest sequence on GPUs of its own.

    Args:
        demand: What to sample.
        gpu: Type of the GPUs.
        gpus: Number of GPUs that the engine spans.
    """
    if gpus not in engine_sizes(demand.architecture, gpus):
        return False
    return _sampler(demand, Fleet(gpu, gpus, per_node=gpus), 1, gpus, None).sequences > 0


def _engine_sizes(demand: Demand, fleet: Fleet, gpus: int) -> list[int]:
    """Return the possible numbers of GPUs per engine, if all engines together have so many."""
    sizes = engine_sizes(demand.architecture, pod_size(gpus, fleet.per_node))
    return [tensor for tensor in sizes if gpus // tensor <= MAX_ENGINES]


def _sampler(
    demand: Demand, fleet: Fleet, engines: int, tensor: int, sharing_with: Trainer | None
) -> Sampler:
    memory = sampling(
        demand.architecture,
        tensor,
        gpu=fleet.gpu,
        reserve=fleet.gpu.reserve(2 if sharing_with else 1),
        lora_rank=demand.sampled_rank,
        neighbour=sharing_with.memory.weights + sharing_with.memory.trained if sharing_with else 0,
    )
    tokens = memory.kv_cache // kv_bytes_per_token(demand.architecture, tensor)
    return Sampler(engines, tensor, memory, tokens, tokens // demand.sequence_length)
