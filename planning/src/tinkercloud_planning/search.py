"""Choosing how a model is trained and sampled on given GPUs.

The rules, in order: trainer and sampler have GPUs of their own if that is possible; a copy of the
model spans as few GPUs as hold it, so that the others train more data; a cut that needs less
communication comes before one that needs more (tensor inside a node, then pipeline, then context;
experts are shared out between ranks that are there anyway). docs/operate/planning.md explains them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tinkercloud_crds.shapes import MAX_ENGINES, MAX_REPLICAS, MAX_TOKENS
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
"""Tokens beyond which a larger micro-batch is not faster."""
SMALL_MICRO_BATCH = 4096
"""Tokens below which a GPU waits for memory more than it computes."""
FEW_SEQUENCES = 8
"""Sequences of full length below which an engine decodes too few tokens at a time."""
_MICRO_BATCH_ROUNDING = 256


@dataclass(frozen=True, slots=True)
class Demand:
    """What sessions will do with a model."""

    architecture: Architecture
    sequence_length: int
    """Tokens of the longest sequence that is trained or sampled."""
    lora_rank: int | None
    """Largest rank of an adapter; None for full fine-tunes."""

    @property
    def sampled_rank(self) -> int:
        """Largest rank that engines make room for: the least that there is, if models are whole."""
        return self.lora_rank or 1

    def least_tokens(self, layout: Layout) -> int:
        """Return the tokens of the smallest micro-batch that takes the longest sequence."""
        return _rounded_up(self.sequence_length, layout)

    def most_tokens(self, layout: Layout) -> int:
        """Return the tokens of the largest micro-batch that is of use."""
        longest = _rounded_up(self.architecture.max_context_length, layout)
        return min(max(MICRO_BATCH_CAP, longest), MAX_TOKENS)

    @property
    def kernels(self) -> Kernels:
        """Those of the trainer that trains it, in the image for NVIDIA GPUs."""
        return FUSED if self.architecture.only_torch else SEPARATE

    def training(self, layout: Layout, tokens: int, *, reserve: int, neighbour: int) -> GpuMemory:
        """Return what `memory.training` estimates for it."""
        return training(
            self.architecture,
            layout,
            tokens=tokens,
            lora_rank=self.lora_rank,
            kernels=self.kernels,
            reserve=reserve,
            neighbour=neighbour,
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that shares a trainer's GPUs."""

    gpus: int
    """How many it spans."""
    lora_rank: int
    """The largest of the adapters that it takes."""

    def kept(self, architecture: Architecture) -> int:
        """Return the bytes of each GPU that it does not give back while the trainer computes."""
        return adapter_slots(architecture, self.gpus, self.lora_rank)


@dataclass(frozen=True, slots=True)
class Trainer:
    """How a model is trained."""

    layout: Layout
    gpus_per_pod: int
    tokens: int
    """Of one micro-batch and data-parallel rank."""
    memory: GpuMemory
    """At the peak of a step, on the fullest GPU."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a model is sampled."""

    engines: int
    tensor: int
    """GPUs of each engine."""
    memory: GpuMemory
    """On each of its GPUs."""
    tokens: int
    """Of keys and values that one engine's cache holds."""
    sequences: int
    """Sequences of full length that one engine's cache holds."""


@dataclass(frozen=True, slots=True)
class Division:
    """Trainer and sampler together."""

    trainer: Trainer
    sampler: Sampler
    colocated: bool
    """Whether they share all GPUs, taking turns, instead of having their own."""


def divide(demand: Demand, fleet: Fleet) -> Division | None:
    """Return the best use of all GPUs, or None if there is none."""
    return next(_separate(demand, fleet), None) or min(
        _colocated(demand, fleet), key=_preferred_together, default=None
    )


def best_trainer(demand: Demand, fleet: Fleet, *, beside: Engine | None) -> Trainer | None:
    """Return the best way of training on all GPUs, or None if there is none.

    Args:
        demand: what is to be trained.
        fleet: the GPUs; those of a node are one pod's.
        beside: what shares each of them, if anything does.
    """
    return next(_trainers(demand, fleet, fleet.count, beside=beside), None)


def _separate(demand: Demand, fleet: Fleet) -> Iterator[Division]:
    """Yield trainer and sampler side by side: halves first; whole nodes if there are several."""
    unit = fleet.per_node if fleet.count > fleet.per_node else 1
    counts = range(unit, fleet.count, unit)
    for count in sorted(counts, key=lambda count: (abs(2 * count - fleet.count), -count)):
        sampler = best_sampler(demand, fleet, fleet.count - count)
        trainer = next(_trainers(demand, fleet, count, beside=None), None) if sampler else None
        if trainer and sampler:
            yield Division(trainer, sampler, colocated=False)


def _colocated(demand: Demand, fleet: Fleet) -> Iterator[Division]:
    """Yield trainers and samplers that leave each other room on all GPUs."""
    for tensor in _engine_sizes(demand, fleet, fleet.count):
        engine = Engine(tensor, demand.sampled_rank)
        for trainer in _trainers(demand, fleet, fleet.count, beside=engine):
            sampler = _sampler(demand, fleet, fleet.count // tensor, tensor, trainer)
            if sampler.sequences:
                yield Division(trainer, sampler, colocated=True)


def _preferred_together(division: Division) -> tuple[int, ...]:
    trainer, sampler = division.trainer, division.sampler
    few = sampler.sequences < FEW_SEQUENCES
    return few, *_preference((trainer.layout, trainer.tokens)), sampler.tensor


def _trainers(
    demand: Demand, fleet: Fleet, gpus: int, *, beside: Engine | None
) -> Iterator[Trainer]:
    """Yield the ways of training on so many GPUs, best first.

    Args:
        demand: what is to be trained.
        fleet: the GPUs' kind and nodes.
        gpus: how many of them train.
        beside: what shares each of those, if anything does.
    """
    model, reserve = demand.architecture, fleet.gpu.contexts(2 if beside else 1)
    kept = beside.kept(model) if beside else 0
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
    """Return the tokens of a micro-batch, or None if the longest sequence is too much for it.

    Args:
        demand: what is to be trained.
        layout: how it is split.
        available: bytes of each GPU that may be used.
    """
    largest = largest_micro_batch(
        demand.architecture,
        layout,
        available=available,
        lora_rank=demand.lora_rank,
        kernels=demand.kernels,
    )
    tokens = min(
        largest // _MICRO_BATCH_ROUNDING * _MICRO_BATCH_ROUNDING, demand.most_tokens(layout)
    )
    return tokens if tokens >= demand.least_tokens(layout) else None


def _rounded_up(tokens: int, layout: Layout) -> int:
    computed = -(-tokens // layout.multiple) * layout.multiple
    return -(-computed // _MICRO_BATCH_ROUNDING) * _MICRO_BATCH_ROUNDING


def best_sampler(demand: Demand, fleet: Fleet, gpus: int) -> Sampler | None:
    """Return the best way to sample on GPUs of an engine's own, or None if there is none.

    Args:
        demand: what is to be sampled.
        fleet: the GPUs' kind and nodes.
        gpus: how many of them sample.
    """
    samplers = [
        sampler
        for tensor in _engine_sizes(demand, fleet, gpus)
        if (sampler := _sampler(demand, fleet, gpus // tensor, tensor, None)).sequences
    ]
    return min(
        samplers,
        key=lambda s: (s.sequences < FEW_SEQUENCES, s.tensor),
        default=None,
    )


def can_sample(demand: Demand, gpu: Gpu, gpus: int) -> bool:
    """Return whether an engine holds a model and one longest sequence on GPUs of its own.

    Args:
        demand: what is to be sampled.
        gpu: what they are.
        gpus: how many the engine spans.
    """
    if gpus not in engine_sizes(demand.architecture, gpus):
        return False
    return _sampler(demand, Fleet(gpu, gpus, per_node=gpus), 1, gpus, None).sequences > 0


def _engine_sizes(demand: Demand, fleet: Fleet, gpus: int) -> list[int]:
    """Return how many GPUs an engine can span, if all engines together have so many."""
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
