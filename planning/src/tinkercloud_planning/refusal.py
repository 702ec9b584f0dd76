"""Error messages for models that do not fit on the given GPUs, with what would fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tinkercloud_crds.pods.shapes import MAX_ENGINES, MAX_GPUS, MAX_REPLICAS
from tinkercloud_planning.gpus import GIB, MEMORY_GIB, Fleet, Gpu, gpu
from tinkercloud_planning.layouts import engine_sizes, layouts, pod_size
from tinkercloud_planning.memory import GpuMemory, kv_bytes_per_token, sampling
from tinkercloud_planning.search import Demand, Engine, best_trainer, can_sample, divide

_SUGGESTED_RANK = 32
_MOST_NODES = 8
_SHORTEST_SEQUENCE = 512
_Plan = Callable[[Demand, Fleet], object | None]
"""Looks for a plan; None if there is none."""


class DoesNotFit(ValueError):
    """The model does not fit on the given GPUs; the message says what would."""


def refusal(demand: Demand, fleet: Fleet) -> DoesNotFit:
    """Return the error for a demand that `divide` found no plan for."""
    if most := _most_gpus(demand, fleet):
        return DoesNotFit(
            f"{fleet} is more than one session of this model can use, and a plan uses all GPUs: a"
            f" session has at most {MAX_REPLICAS} trainer pods and {MAX_ENGINES} engines, each on"
            f" one node ({fleet.per_node} GPUs). Use {most}x{fleet.gpu.name}"
        )
    model = demand.architecture
    what = "full fine-tuning" if demand.lora_rank is None else f"LoRA of rank {demand.lora_rank}"
    if demand.slots > 1:
        what = f"{what} for {demand.slots} runs that share a cluster (--pool-slots)"
    remedies = _remedies(demand, fleet, divide)
    if demand.lora_rank and best_trainer(demand, fleet, engine=None):
        remedies.append("--train-only, with external servers on other GPUs")
    return DoesNotFit(
        f"{what} of this model ({model.model_type}, {model.parameters / 1e9:.1f}B parameters) with"
        f" sequences of {demand.sequence_length} tokens does not fit on {fleet}."
        f" {_needs(demand, fleet)} {_what_would_fit(remedies)}"
    )


def trainer_refusal(demand: Demand, fleet: Fleet, engine: Engine | None) -> DoesNotFit:
    """Return the error for a model that cannot be trained on the given GPUs, shared or not."""
    model = demand.architecture
    needed = min(_training_needs(demand, fleet, engine), key=lambda memory: memory.total)

    def plan(other: Demand, gpus: Fleet) -> object | None:
        if engine is not None and gpus.count % engine.gpus:
            return None
        return best_trainer(other, gpus, engine=engine)

    remedies = _remedies(demand, fleet, plan)
    return DoesNotFit(
        f"training this model ({model.model_type}, {model.parameters / 1e9:.1f}B parameters) with"
        f" sequences of {demand.sequence_length} tokens does not fit on {fleet}: each GPU has"
        f" {gib(fleet.gpu.memory)} and would need {gib(needed.total)} ({describe(needed)})."
        f" {_what_would_fit(remedies)}"
    )


def engine_refusal(demand: Demand, kind: Gpu, gpus: int) -> DoesNotFit:
    """Return the error for a model that an engine cannot sample on so many GPUs of its own."""
    model = demand.architecture
    if gpus not in engine_sizes(model, gpus):
        problem = f"an engine cannot divide this model ({model.model_type}) over so many GPUs"
    else:
        needed = _sampling_need(demand, Fleet(kind, gpus, per_node=gpus), gpus, None)
        problem = (
            f"an engine of this model ({model.model_type}, {model.parameters / 1e9:.1f}B"
            f" parameters) with sequences of {demand.sequence_length} tokens would need"
            f" {gib(needed.total)} of each {kind.name} ({describe(needed)}), which has"
            f" {gib(kind.memory)}"
        )
    enough = next((n for n in range(1, MAX_GPUS + 1) if can_sample(demand, kind, n)), None)
    remedy = (
        f"use {enough}"
        if enough is not None
        else f"no number up to {MAX_GPUS} is sufficient: use larger GPUs, shorter sequences or a"
        " smaller limits.maxLoraRank"
    )
    return DoesNotFit(f"{gpus}, but {problem}; {remedy}")


def fewest_gpus(demand: Demand, fleet: Fleet) -> int | None:
    """Return how many of these GPUs are sufficient: some of a node, or up to eight nodes."""
    return _fewest_gpus(demand, fleet, divide)


def most_sessions(demand: Demand, fleet: Fleet) -> tuple[int, int] | None:
    """Return how many sessions can divide these GPUs equally, and how many GPUs each gets."""
    sessions = {fleet.share(number).count: number for number in range(1, fleet.count + 1)}
    shares = (count for count in sorted(sessions) if divide(demand, replace(fleet, count=count)))
    return next(((sessions[count], count) for count in shares), None)


def _counts(per_node: int) -> list[int]:
    """Return the numbers of GPUs that are suggested, in ascending order."""
    nodes = [per_node * number for number in range(2, _MOST_NODES + 1)]
    return [*range(1, per_node + 1), *nodes]


def _most_gpus(demand: Demand, fleet: Fleet) -> int | None:
    """Return how many GPUs a session can use; None if the given number is not too large."""
    if fleet.count <= MAX_REPLICAS * fleet.per_node or fewest_gpus(demand, fleet) is None:
        return None
    nodes = range(MAX_REPLICAS + MAX_ENGINES, 0, -1)
    counts = (count * fleet.per_node for count in nodes if count * fleet.per_node < fleet.count)
    return next((count for count in counts if divide(demand, replace(fleet, count=count))), None)


def describe(memory: GpuMemory) -> str:
    """Return the parts of an estimate as text."""
    parts = [(name.replace("_", " "), size) for name, size in memory.parts() if size]
    return ", ".join(f"{name} {gib(size)}" for name, size in parts)


def gib(size: int) -> str:
    """Return a size in bytes as GiB, for people."""
    return f"{size / GIB:.1f} GiB"


def _needs(demand: Demand, fleet: Fleet) -> str:
    """Return the memory of the least demanding ways to train and to sample, as text."""
    trains = min(_training_needs(demand, fleet, None), key=lambda memory: memory.total)
    samples = min(
        (_sampling_need(demand, fleet, tensor, None) for tensor in _engine_sizes(demand, fleet)),
        key=lambda memory: memory.total,
    )
    has = f"A GPU has {gib(fleet.gpu.memory)}"
    if max(trains.total, samples.total) > fleet.gpu.memory:
        return (
            f"{has}. If all of them trained, each would need {gib(trains.total)}"
            f" ({describe(trains)}); if all of them sampled, {gib(samples.total)}"
            f" ({describe(samples)})."
        )
    trains, samples = min(
        _needs_together(demand, fleet), key=lambda needs: max(memory.total for memory in needs)
    )
    return (
        f"{has}. That is enough for training alone, or for sampling alone, but here they have to"
        " share the same GPUs, where the trainer keeps its weights and trained state, and the"
        " engine"
        " its adapter slots (each counts as the other's neighbour):"
        f" training would need {gib(trains.total)} ({describe(trains)}), sampling"
        f" {gib(samples.total)} ({describe(samples)})."
    )


def _needs_together(demand: Demand, fleet: Fleet) -> Iterator[tuple[GpuMemory, GpuMemory]]:
    """Yield the memory of training and of sampling on a GPU that they share."""
    for tensor in _engine_sizes(demand, fleet):
        for trains in _training_needs(demand, fleet, Engine(tensor, demand.sampled_rank)):
            yield trains, _sampling_need(demand, fleet, tensor, trains)


def _training_needs(demand: Demand, fleet: Fleet, engine: Engine | None) -> list[GpuMemory]:
    model, reserve = demand.architecture, fleet.gpu.contexts(2 if engine else 1)
    kept = engine.kept(model) if engine else 0
    return [
        demand.training(layout, demand.least_tokens(layout), reserve=reserve, neighbour=kept)
        for layout in layouts(model, fleet.count, pod_size(fleet.count, fleet.per_node))
    ]


def _engine_sizes(demand: Demand, fleet: Fleet) -> list[int]:
    return engine_sizes(demand.architecture, pod_size(fleet.count, fleet.per_node))


def _sampling_need(
    demand: Demand, fleet: Fleet, tensor: int, trainer: GpuMemory | None
) -> GpuMemory:
    model = demand.architecture
    memory = sampling(
        model,
        tensor,
        gpu=fleet.gpu,
        reserve=fleet.gpu.reserve(2 if trainer else 1),
        lora_rank=demand.sampled_rank,
        neighbour=trainer.weights + trainer.trained if trainer else 0,
    )
    return replace(memory, kv_cache=demand.sequence_length * kv_bytes_per_token(model, tensor))


def _what_would_fit(remedies: list[str]) -> str:
    if not remedies:
        return "The planner found no change that would fit."
    return f"What would fit: {'; '.join(remedies)}."


def _remedies(demand: Demand, fleet: Fleet, plan: _Plan) -> list[str]:
    """Return changes, each of which would be sufficient for a plan."""
    remedies = _sufficient_gpus(demand, fleet, plan)
    if shorter := _longest_sequence(demand, fleet, plan):
        remedies.append(f"sequences of {shorter} tokens")
    if rank := _largest_rank(demand, fleet, plan):
        remedies.append(f"LoRA of rank {rank}")
    return remedies


def _sufficient_gpus(demand: Demand, fleet: Fleet, plan: _Plan) -> list[str]:
    """Return the fewest GPUs of any kind that are sufficient, then the fewest of the given kind.

    Of as many GPUs of several kinds, those with the least memory come first: they cost the least.
    """
    others = [gpu(name) for name in MEMORY_GIB if name != fleet.gpu.name]
    kinds = sorted([fleet.gpu, *others], key=lambda kind: kind.memory)
    choices = (
        Fleet(kind, count, fleet.per_node) for count in _counts(fleet.per_node) for kind in kinds
    )
    smallest = next((each for each in choices if plan(demand, each)), None)
    own = _fewest_gpus(demand, fleet, plan)
    found = (smallest, replace(fleet, count=own) if own else None)
    return list(dict.fromkeys(str(each) for each in found if each is not None))


def _fewest_gpus(demand: Demand, fleet: Fleet, plan: _Plan) -> int | None:
    counts = _counts(fleet.per_node)
    return next((count for count in counts if plan(demand, replace(fleet, count=count))), None)


def _largest_rank(demand: Demand, fleet: Fleet, plan: _Plan) -> int | None:
    most = demand.lora_rank - 1 if demand.lora_rank else _SUGGESTED_RANK
    fitting = None
    for power in range(most.bit_length()):
        if plan(replace(demand, lora_rank=1 << power), fleet) is None:
            break
        fitting = 1 << power
    return fitting


def _longest_sequence(demand: Demand, fleet: Fleet, plan: _Plan) -> int | None:
    length = demand.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if plan(replace(demand, sequence_length=length), fleet):
            return length
        length //= 2
    return None
