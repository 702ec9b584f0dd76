"""Plans: the part of a BaseModel's spec that describes how a model runs, with reasons."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from tinkercloud_crds.pods.shapes import (
    ADAPTER_SLOTS,
    JOURNAL_SHARE,
    JOURNALS_SHARE,
    MAX_ENGINES,
    MAX_TOKENS,
    OBJECT_STORE_SHARE,
    WHOLE_MODEL_SHARE,
    EnginesShape,
    ExternalServers,
    Parallelism,
    Resources,
    SamplerShape,
    TrainerShape,
)
from tinkercloud_crds.structural import Part
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.gpus import GIB, Fleet
from tinkercloud_planning.layouts import Layout, divisors, engine_sizes, pod_size
from tinkercloud_planning.memory import state_bytes, weight_bytes
from tinkercloud_planning.refusal import DoesNotFit, gib, refusal, trainer_refusal
from tinkercloud_planning.saving import STORE_BYTES_PER_SECOND, suspend_seconds
from tinkercloud_planning.search import (
    FEW_SEQUENCES,
    Demand,
    Division,
    Engine,
    Sampler,
    Trainer,
    best_trainer,
    divide,
    micro_batch_tokens,
    smallest_engine,
)
from tinkercloud_planning.serving import serving_advice

_CORES_PER_GPU = 4
_SHARED_MEMORY_GIB_PER_GPU = 2
"""In addition to Ray's object store."""
_POD_MEMORY_GIB = 16
"""Memory of a pod or a colocated engine, in addition to twice the weights that it loads onto its
GPUs, or its shared memory, where Ray's object store holds the state of a model: a state on its way
to ranks is in the store of their node once, and of one that leaves them the node's parts. The two
never happen at the same time."""
_SCRATCH_GIB = 16
"""Scratch space of a pod, in addition to the model, which it may have to download, and of a head,
in addition to the snapshots of a whole model."""
_SNAPSHOTS = 2
"""Snapshots of a model on the disk of a head: the last one, and the one that replaces it."""
_JOURNAL_GIB = 0.5
"""Largest size of the journal of a run at which a snapshot replaces it
(`DurabilityConfig.max_journal_bytes`)."""
_HEAD_CORES = 4
_HEAD_MEMORY_GIB = 12
"""Memory of a head, in addition to models: waiting requests, results, sampled adapters."""
_HEAD_SHARED_MEMORY_GIB = 1
"""In addition to Ray's object store."""
_USUAL_NODE_GIB = 2048
"""Host memory of large nodes with eight GPUs: DGX and HGX machines, and cloud instances."""
_COPIES_OF_STATE = 2
"""Copies of a model's values and moments: in Ray's object store and in files. Gradients follow
later. The snapshot of a whole model, which may be written at the same time, is another one."""
ENGINE_IMAGE = "sglang:v0.5.23"
"""SGLang image of the release that the head is tested against."""
ADAPTERS_CLAIM = "adapters"
"""Default name of the volume for adapters."""
_OUTSIDE_EXPERTS = ("o_proj", "lm_head")
"""Modules, by SGLang's names, that every mixture-of-experts model has outside its experts."""
_ADAPTERS_FOLDER = "/adapters"
"""Where external servers mount that volume, unless you change it."""
_START_SECONDS = 60
"""Assumed time of a start in addition to downloads: scheduling, and reading weights from a disk."""
DEVICE_CLASS = "gpu.nvidia.com"
"""DeviceClass of NVIDIA's driver, for engines that share GPUs with trainers."""
_GPU_MEMORY_PERCENT = (10, 95)
"""Minimum and maximum that a BaseModel accepts."""
_MOST_CACHED_TOKENS = 1 << 30
"""Maximum that a BaseModel accepts."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A choice of the planner, and its justification."""

    choice: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How to train and sample a model."""

    demand: Demand
    fleet: Fleet
    division: Division
    reasons: tuple[Reason, ...]

    @property
    def trainer(self) -> TrainerShape:
        """The trainer pods."""
        trainer, layout = self.division.trainer, self.division.trainer.layout
        return TrainerShape(
            backend="torch" if self.demand.architecture.only_torch else "megatron",
            replicas=layout.gpus // trainer.gpus_per_pod,
            gpus_per_replica=trainer.gpus_per_pod,
            resources=self._resources(
                trainer.gpus_per_pod,
                trainer.memory.weights,
                _state(self.demand),
            ),
            parallelism=_parallelism(layout),
            max_batch_tokens=trainer.tokens,
        )

    @property
    def sampler(self) -> SamplerShape:
        """The sampler pods, or placeholders of the external servers that replace them."""
        sampler = _engines_of_sessions(self.fleet, self.division)
        if sampler is None:
            servers = self.division.sampler.engines if self.division.sampler else 1
            return SamplerShape(
                backend="external",
                external=ExternalServers(
                    kind="sglang",
                    urls=[f"http://sglang-{number}:30000" for number in range(servers)],
                    adapters_claim_name=ADAPTERS_CLAIM,
                    adapters_folder=_ADAPTERS_FOLDER,
                ),
            )
        return SamplerShape(
            backend="sglang",
            image=ENGINE_IMAGE,
            replicas=sampler.engines,
            gpus_per_replica=sampler.tensor,
            resources=self._resources(sampler.tensor, sampler.memory.weights, 0),
            colocated=self.division.colocated,
            engines=self._engines(sampler),
        )

    def _engines(self, sampler: Sampler) -> EnginesShape:
        """Settings of the engines. Colocated ones may start before or after the trainers load."""
        if not self.division.colocated:
            return EnginesShape(
                adapters_claim_name=ADAPTERS_CLAIM, lora_target_modules=self._adapted
            )
        gpu = self.fleet.gpu
        own = sampler.memory.weights + sampler.memory.trained + sampler.memory.kv_cache
        free = gpu.memory - gpu.contexts(1) - sampler.memory.neighbour
        least, most = _GPU_MEMORY_PERCENT
        return EnginesShape(
            adapters_claim_name=ADAPTERS_CLAIM,
            lora_target_modules=self._adapted,
            device_class_name=DEVICE_CLASS,
            gpu_memory_percent=min(max(-(-100 * own // free), least), most),
            max_cached_tokens=min(sampler.tokens, _MOST_CACHED_TOKENS),
        )

    @property
    def _adapted(self) -> list[str] | None:
        """Modules that adapters may target in engines; targeted experts accept no full weights."""
        trains_experts = self.demand.lora_rank is None and self.demand.architecture.experts
        return list(_OUTSIDE_EXPERTS) if trains_experts else None

    @property
    def head(self) -> Resources:
        """Resources of the head's container."""
        return Resources(
            cpu=str(_HEAD_CORES),
            memory=f"{_head_memory_gib(self.demand)}Gi",
            shared_memory=f"{_HEAD_SHARED_MEMORY_GIB + _store_gib(_state(self.demand))}Gi",
            scratch=f"{_head_scratch_gib(self.demand)}Gi",
        )

    @property
    def _model_gib(self) -> int:
        return -(-weight_bytes(self.demand.architecture) // GIB)

    def _resources(self, gpus: int, weights: int, state: int) -> Resources:
        """Return the resources of a pod, or of a colocated engine, apart from GPUs.

        Weights pass through its memory, and those of a colocated engine stay there while they are
        not on its GPUs. The state of a model passes through Ray's object store.
        """
        return Resources(
            cpu=str(_CORES_PER_GPU * gpus),
            memory=f"{_pod_memory_gib(gpus, weights, state)}Gi",
            shared_memory=f"{_SHARED_MEMORY_GIB_PER_GPU * gpus + _store_gib(state)}Gi",
            scratch=f"{_SCRATCH_GIB + self._model_gib}Gi",
        )

    def spec(self) -> dict[str, Any]:
        """Return the planned part of a BaseModel's spec, as in YAML.

        The model's name, its source and the head's image are missing.
        """
        slots = self.demand.slots
        shared = {"sharing": "Shared", "pool": {"slotsPerCluster": slots}} if slots > 1 else {}
        return {
            **shared,
            "maxContextLength": self.demand.sequence_length,
            "limits": {"maxLoraRank": self.demand.sampled_rank},
            "head": {
                "resources": _written(self.head),
                "suspendSeconds": suspend_seconds(slots * _state(self.demand)),
            },
            "trainer": _written(self.trainer),
            "sampler": _written(self.sampler),
        }


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """How the given GPUs train a model."""

    parallelism: Parallelism
    max_batch_tokens: int
    state_bytes: int
    """Size of the trained state of one model: values and moments."""
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "; ".join(f"{reason.choice} {reason.value}: {reason.why}" for reason in self.reasons)


def plan(
    architecture: Architecture,
    fleet: Fleet,
    *,
    sequence_length: int,
    lora_rank: int | None,
    slots: int = 1,
) -> ModelPlan:
    """Return how to train and sample a model on all of the given GPUs.

    Args:
        architecture: The model.
        fleet: The GPUs.
        sequence_length: Maximum sequence length in tokens.
        lora_rank: Maximum rank of an adapter; None for full fine-tuning.
        slots: Number of adapters on one cluster of a pool; 1 if there is no pool.

    Raises:
        DoesNotFit: There is no plan; the message says what would fit.
    """
    demand = _demand(architecture, sequence_length, lora_rank, slots)
    division = divide(demand, fleet)
    if division is None:
        raise DoesNotFit(f"{refusal(demand, fleet)}{serving_advice(demand, fleet)}")
    return ModelPlan(demand, fleet, division, tuple(_reasons(demand, fleet, division)))


def plan_training(
    architecture: Architecture,
    fleet: Fleet,
    *,
    sequence_length: int,
    lora_rank: int | None,
    slots: int = 1,
) -> ModelPlan:
    """Return how to train a model on all of the given GPUs; external servers sample.

    The arguments are those of `plan`.

    Raises:
        DoesNotFit: There is no plan; the message says what would fit.
    """
    if lora_rank is None:
        raise DoesNotFit(
            "full fine-tuning with external servers: they accept adapters only; plan adapters"
            " (a LoRA rank), or engines of the session (not --train-only)"
        )
    demand = _demand(architecture, sequence_length, lora_rank, slots)
    trainer = best_trainer(demand, fleet, engine=None)
    if trainer is None:
        raise trainer_refusal(demand, fleet, None)
    division = Division(trainer, None, colocated=False)
    return ModelPlan(demand, fleet, division, tuple(_reasons(demand, fleet, division)))


def _demand(
    architecture: Architecture, sequence_length: int, lora_rank: int | None, slots: int
) -> Demand:
    longest = min(architecture.max_context_length, MAX_TOKENS)
    if not 16 <= sequence_length <= longest:
        raise DoesNotFit(
            f"sequence_length: {sequence_length}; this model accepts 16 to {longest} tokens"
            f" (max_position_embeddings, extended by rope_scaling, or, if smaller, its"
            f" sliding_window, because engines attend to whole sequences; at most {MAX_TOKENS})"
        )
    if lora_rank is None and slots > 1:
        raise DoesNotFit(
            f"slots: {slots}, but a fully fine-tuned model has a cluster of its own; plan adapters"
            " (a LoRA rank) for a pool, or one slot"
        )
    return Demand(architecture, sequence_length, lora_rank, slots)


def plan_trainer(demand: Demand, fleet: Fleet, *, engine: Engine | None) -> TrainerPlan:
    """Return how to train a model on all of the given GPUs.

    Args:
        demand: What to train.
        fleet: The GPUs; all GPUs of a node belong to one pod.
        engine: The engine on each of them, if they are shared.

    Raises:
        DoesNotFit: There is no plan.
    """
    trainer = best_trainer(demand, fleet, engine=engine)
    if trainer is None:
        raise trainer_refusal(demand, fleet, engine)
    reasons = (*_why_layout(demand, fleet, trainer), _why_tokens(demand, trainer))
    return TrainerPlan(_parallelism(trainer.layout), trainer.tokens, _state(demand), reasons)


def adapters_that_fit(
    demand: Demand, fleet: Fleet, *, engine: Engine | None, most_tokens: int
) -> int:
    """Return how many adapters fit at the same time, each with its gradient and moments.

    Args:
        demand: What to train, with the rank of the adapters.
        fleet: The GPUs; all GPUs of a node belong to one pod.
        engine: The engine on each of them, if they are shared.
        most_tokens: Tokens of the largest micro-batch.

    Raises:
        DoesNotFit: There is no plan.
    """
    trainer = best_trainer(demand, fleet, engine=engine)
    if trainer is None:
        raise trainer_refusal(demand, fleet, engine)
    memory = demand.training(
        trainer.layout,
        min(trainer.tokens, most_tokens),
        reserve=trainer.memory.reserve,
        neighbour=trainer.memory.neighbour,
    )
    return 1 + max(0, fleet.gpu.memory - memory.total) // memory.trained


def _engines_of_sessions(fleet: Fleet, division: Division) -> Sampler | None:
    """Return the engines of a session's pods; None if external servers sample."""
    sampler = division.sampler
    return sampler if sampler and sampler.tensor <= fleet.per_node else None


def _parallelism(layout: Layout) -> Parallelism:
    return Parallelism(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
    )


def _written(part: Part) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


def _head_memory_gib(demand: Demand) -> int:
    copies = _COPIES_OF_STATE + (1 if demand.lora_rank is None else 0)
    return _HEAD_MEMORY_GIB + -(-copies * _state(demand) // GIB)


def _head_scratch_gib(demand: Demand) -> int:
    snapshots = _SNAPSHOTS * _state(demand) / GIB
    if demand.lora_rank is None:
        return _SCRATCH_GIB + ceil(snapshots / WHOLE_MODEL_SHARE)
    if demand.slots == 1:
        return max(_SCRATCH_GIB, ceil(snapshots / (JOURNALS_SHARE - JOURNAL_SHARE)))
    return max(_SCRATCH_GIB, ceil(demand.slots * (snapshots + _JOURNAL_GIB) / JOURNALS_SHARE))


def _pod_memory_gib(gpus: int, weights: int, state: int) -> int:
    shared = _SHARED_MEMORY_GIB_PER_GPU * gpus + _store_gib(state)
    return _POD_MEMORY_GIB + max(-(-2 * gpus * weights // GIB), shared)


def _store_gib(passing: int) -> int:
    """Return the size of /dev/shm in GiB with which Ray's object store holds so many bytes."""
    return ceil(passing / OBJECT_STORE_SHARE / GIB)


def _state(demand: Demand) -> int:
    return state_bytes(demand.architecture, demand.lora_rank)


def _reasons(demand: Demand, fleet: Fleet, division: Division) -> list[Reason]:
    return [
        _why_these_gpus(fleet, division),
        *_why_torch(demand),
        *_why_layout(demand, fleet, division.trainer),
        _why_tokens(demand, division.trainer),
        *_why_engines(demand, fleet, division),
        *_why_adapted_in_part(demand),
        *_why_float8(demand),
        *_why_memory(demand, fleet, division),
        *_why_scratch(demand),
        _why_saving(demand),
        *_why_disk_and_start(demand, fleet, division),
        *_what_sharing_needs(division),
    ]


def _why_layout(demand: Demand, fleet: Fleet, trainer: Trainer) -> list[Reason]:
    layout = trainer.layout
    axes = ["tensor", "pipeline", "context", *(["expert"] if demand.architecture.experts else [])]
    copies = f"what is left: {layout.gpus} that train / tensor x pipeline x context"
    return [
        *(_why_axis(demand, fleet, trainer, axis) for axis in axes),
        Reason("data", str(layout.data), copies),
    ]


def _why_adapted_in_part(demand: Demand) -> list[Reason]:
    if demand.lora_rank is None:
        return []
    reasons = []
    if not demand.architecture.engines_adapt_attention:
        why = "SGLang does not adapt uncompressed query projections (q_lora_rank: null)"
        reasons.append(Reason("adapters", "with train_attn=False", why))
    if not demand.architecture.engines_adapt_mlp:
        why = "SGLang does not support adapters on this family's experts (named w1, w2, w3)"
        reasons.append(Reason("adapters", "with train_mlp=False", why))
    if not demand.architecture.engines_adapt_output:
        why = "SGLang does not support adapters on the output layer of this family (Gemma)"
        reasons.append(Reason("adapters", "with train_unembed=False", why))
    return reasons


def _why_torch(demand: Demand) -> list[Reason]:
    refused = demand.architecture.only_torch
    if not refused:
        return []
    why = f"the megatron trainer refuses {refused}; a copy on each GPU"
    return [Reason("trainer", "torch", why)]


def _why_these_gpus(fleet: Fleet, division: Division) -> Reason:
    trainers = division.trainer.layout.gpus
    if division.sampler is None:
        return Reason("GPUs", f"{trainers} train", "external servers sample, on other GPUs")
    if not division.colocated:
        value = f"{trainers} train, {fleet.count - trainers} sample"
        return Reason("GPUs", value, "separate GPUs, so training and sampling run concurrently")
    why = "one can't be divided" if fleet.count == 1 else "no part of them is enough for either"
    return Reason("GPUs", f"{fleet.count} train and sample", f"{why}; they take turns (colocated)")


def _why_axis(demand: Demand, fleet: Fleet, trainer: Trainer, axis: str) -> Reason:
    value: int = getattr(trainer.layout, axis)
    if value == 1:
        return Reason(axis, "1", "not needed")
    smaller = [divisor for divisor in divisors(value) if divisor < value][-1]
    layout = _with(trainer.layout, axis, smaller)
    reserve, kept = trainer.memory.reserve, trainer.memory.neighbour
    tokens = micro_batch_tokens(demand, layout, fleet.gpu.memory - reserve - kept)
    if tokens is None:
        least = demand.training(
            layout, demand.least_tokens(layout), reserve=reserve, neighbour=kept
        )
        need, has = gib(least.total), gib(fleet.gpu.memory)
        return Reason(axis, str(value), f"with {smaller}, a GPU would need {need} and has {has}")
    if tokens < trainer.tokens:
        why = f"with {smaller}, a micro-batch would have {tokens} tokens only"
        return Reason(axis, str(value), why)
    return Reason(axis, str(value), f"with {smaller}, too little is left for the sampler")


def _with(layout: Layout, axis: str, value: int) -> Layout:
    """Return a layout with one axis changed, and the remaining factor as data parallelism."""
    if axis == "expert":
        return replace(layout, expert=value)
    factor = getattr(layout, axis) // value
    return replace(layout, data=layout.data * factor, **{axis: value})


def _why_tokens(demand: Demand, trainer: Trainer) -> Reason:
    why = (
        "more would not be faster"
        if trainer.tokens == demand.most_tokens(trainer.layout)
        else f"what fits; their activations take {gib(trainer.memory.activations)} of each GPU"
    )
    return Reason("maxBatchTokens", str(trainer.tokens), why)


def _why_engines(demand: Demand, fleet: Fleet, division: Division) -> list[Reason]:
    sampler = _engines_of_sessions(fleet, division)
    if sampler is None:
        return _what_servers_need(demand, fleet, division.sampler)
    gpus = sampler.engines * sampler.tensor
    value = f"{sampler.engines} x {_some(sampler.tensor, 'GPU')}"
    holds = f"one holds {sampler.sequences} sequences of {demand.sequence_length} tokens"
    if sampler.tensor == 1:
        return [Reason("sampler", value, holds)]
    sizes = engine_sizes(demand.architecture, pod_size(gpus, fleet.per_node))
    smaller = max(size for size in sizes if size < sampler.tensor)
    why = (
        f"smaller ones would be more than the {MAX_ENGINES} of a session"
        if gpus // smaller > MAX_ENGINES
        else f"fewer GPUs would hold less than {FEW_SEQUENCES}"
    )
    return [Reason("sampler", value, f"{holds}; {why}")]


def _what_servers_need(demand: Demand, fleet: Fleet, planned: Sampler | None) -> list[Reason]:
    """Return what servers that are not pods of a session need.

    Args:
        demand: What to sample.
        fleet: Type of the GPUs, and their number per node.
        planned: The servers, if they use some of the planned GPUs.
    """
    engine = planned or smallest_engine(demand, fleet)
    if engine is None:
        why = f"no number of {fleet.gpu.name} holds the model, its adapter slots and a sequence"
        return [Reason("servers", "external", f"{why}; use larger GPUs or a smaller rank")]
    nodes = -(-engine.tensor // fleet.per_node)
    value = f"{f'{planned.engines} x ' if planned else ''}{_some(engine.tensor, 'GPU')} each"
    holds = f"one holds {engine.sequences} sequences of {demand.sequence_length} tokens"
    why = "no node holds an engine, and a session's engine is one pod; " if planned else ""
    spans = f" --nnodes {nodes}" if nodes > 1 else ""
    return [
        Reason("servers", value, f"{why}{holds}"),
        Reason(
            "server options",
            f"--tp-size {engine.tensor}{spans}",
            f"you start SGLang, with --enable-lora --max-lora-rank {demand.sampled_rank}"
            f" --max-loras-per-batch {ADAPTER_SLOTS} (docs/understand/inference-servers.md)",
        ),
    ]


def _why_float8(demand: Demand) -> list[Reason]:
    if demand.architecture.weight_block == 1:
        return []
    why = "engines compute in it, trainers in bfloat16; adapters over float8 are unproven"
    return [Reason("weights", "float8 as stored", why)]


def _why_memory(demand: Demand, fleet: Fleet, division: Division) -> list[Reason]:
    """Return the host memory that head and pods need, with a note if it is unusually large."""
    trainer, sampler = division.trainer, _engines_of_sessions(fleet, division)
    trains = _pod_memory_gib(trainer.gpus_per_pod, trainer.memory.weights, _state(demand))
    on_their_way = "for weights on their way to GPUs"
    needs = [
        ("head", _head_memory_gib(demand), "for what passes through it; the model is elsewhere"),
        ("trainer pod", trains, f"{on_their_way}, or what is trained as it is handed over"),
    ]
    if sampler:
        samples = _pod_memory_gib(sampler.tensor, sampler.memory.weights, 0)
        needs.append(("engine" if division.colocated else "sampler pod", samples, on_their_way))
    unusual = f"; nodes with 8 GPUs usually have {_USUAL_NODE_GIB} at most"
    gpus, pods = trainer.layout.gpus, trainer.layout.gpus // trainer.gpus_per_pod
    engines, engine_gpus = (sampler.engines, sampler.tensor) if sampler else (0, 0)
    memory = needs[0][1] + pods * trains + engines * needs[-1][1]
    cores = _HEAD_CORES + _CORES_PER_GPU * (gpus + engines * engine_gpus)
    return [
        *(
            Reason(part, f"{need} GiB of memory", why + (unusual if need > _USUAL_NODE_GIB else ""))
            for part, need, why in needs
        ),
        Reason(
            "host",
            f"{memory} GiB, {cores} cores",
            f"requested together; pods of trainers: {pods}, engines: {engines}",
        ),
    ]


def _why_scratch(demand: Demand) -> list[Reason]:
    needed = _head_scratch_gib(demand)
    if needed == _SCRATCH_GIB:
        return []
    size = f"{_SNAPSHOTS} snapshots of {gib(_state(demand))}"
    share = WHOLE_MODEL_SHARE if demand.lora_rank is None else JOURNALS_SHARE - JOURNAL_SHARE
    why = (
        f"{size} may take {share:.0%} of it; with less, the run is not durable (head.durability)"
        if demand.slots == 1
        else f"{demand.slots} runs, each with {size} and a journal, may take {JOURNALS_SHARE:.0%}"
        " of it; with less, some are not durable (head.durability)"
    )
    return [Reason("scratch space", f"{needed} GiB of the head", why)]


def _why_saving(demand: Demand) -> Reason:
    state, rate = demand.slots * _state(demand), STORE_BYTES_PER_SECOND // 1_000_000
    why = f"{gib(state)} of values and moments at {rate} MB/s, twice that, and a minute"
    return Reason("suspendSeconds", str(suspend_seconds(state)), why)


def _why_disk_and_start(demand: Demand, fleet: Fleet, division: Division) -> list[Reason]:
    """Return the scratch space of all pods, and the time until a session is ready."""
    trainer, sampler = division.trainer, _engines_of_sessions(fleet, division)
    size = weight_bytes(demand.architecture)
    apart = sampler.engines if sampler and not division.colocated else 0
    pods = trainer.layout.gpus // trainer.gpus_per_pod + apart
    scratch = _head_scratch_gib(demand) + pods * (_SCRATCH_GIB + -(-size // GIB))
    rate = STORE_BYTES_PER_SECOND
    seconds = _START_SECONDS + size / rate
    return [
        Reason(
            "disk",
            f"{scratch} GiB together",
            f"scratch space of one session; each of {_some(pods, 'pod')} downloads {gib(size)},"
            " except from a volume",
        ),
        Reason(
            "start",
            f"{ceil(seconds / 60)} min",
            f"an assumption: that download at {rate // 1_000_000} MB/s, and a minute; images come"
            " on top",
        ),
    ]


def _what_sharing_needs(division: Division) -> list[Reason]:
    if not division.colocated:
        return []
    why = f"needs Kubernetes 1.34 or newer, and a driver of devices that offers {DEVICE_CLASS}"
    return [Reason("cluster", "claims of devices", why)]


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
