"""Resolves what a session gets: its BaseModel with the session's overrides, or a rejection.

A session may reduce what its BaseModel offers and choose among the values that it allows.
"""

import functools
from dataclasses import dataclass, replace

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import MAX_MESSAGE_LENGTH, Reason
from tinkercloud_crds.pods.extras import ExtendedResource, total
from tinkercloud_crds.pods.placement import Placement, RolePlacement
from tinkercloud_crds.pods.shapes import (
    Idle,
    Planning,
    Resources,
    SamplerShape,
    TrainerShape,
)
from tinkercloud_crds.training_session import SERVING_ROLES, TrainingSessionSpec
from tinkercloud_operator.spec.allowed import disallowed, over_limit
from tinkercloud_operator.spec.parallelism import check_engine, plan_parallelism
from tinkercloud_operator.spec.pool_slots import pool_of
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_planning.plan import TrainerPlan
from tinkercloud_planning.refusal import DoesNotFit
from tinkercloud_planning.saving import suspend_seconds
from tinkercloud_planning.search import Engine

RAY_NODE = Resources(cpu="200m", memory="1Gi")
"""Resources of Ray's own processes in a pod whose engine runs outside Ray."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a session cannot be served with its current spec."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The resources and the placement of the pods of one component."""

    component: str
    count: int
    resources: Resources
    placement: Placement
    gpus: int
    """GPUs of each pod that its node counts; devices claimed through DRA are not included."""
    extended: tuple[ExtendedResource, ...] = ()
    """Other extended resources of each pod."""


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs that a pod claims through DRA, so that its containers share them."""

    class_name: str
    """Name of the DeviceClass."""
    count: int


@dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """The pods that a session gets."""

    base_model: BaseModelSpec
    trainer: TrainerShape | None
    """None for a session that only samples."""
    sampler: SamplerShape
    placement: Placement
    trains_whole_model: bool = False
    """Whether the session trains one model by full fine-tuning."""
    plan: str | None = None
    """The planned parallelism and its explanation, if the operator chose it."""

    @property
    def trainers(self) -> int:
        """Number of trainer pods."""
        return self.trainer.replicas if self.trainer is not None else 0

    @property
    def head_computes(self) -> bool:
        """Whether the head itself trains or samples, and so loads the base model."""
        trains = self.trainer is not None and self.trainer.replicas == 0
        return trains or self.sampler.backend == "torch"

    @property
    def engines_per_trainer(self) -> int:
        """Engines in each trainer pod; 0 if engines have their own pods, or if there are none."""
        if self.trainer is None or self.sampler.backend != "sglang" or not self.sampler.colocated:
            return 0
        return self.trainer.gpus_per_replica // self.sampler.gpus_per_replica

    @property
    def samplers(self) -> int:
        """Number of sampler pods, each with one engine; the minimum if it follows the load."""
        return self.sampler.least_replicas if self._has_sampler_pods else 0

    @property
    def most_samplers(self) -> int:
        """Maximum number of sampler pods."""
        return self.sampler.most_replicas if self._has_sampler_pods else 0

    @property
    def _has_sampler_pods(self) -> bool:
        return self.sampler.backend == "sglang" and not self.engines_per_trainer

    @property
    def devices(self) -> Devices | None:
        """The devices that each pod with GPUs claims; None if GPUs are extended resources."""
        engines = self.sampler.engines
        if engines is None or engines.device_class_name is None:
            return None
        worker = self.trainer or self.sampler
        return Devices(engines.device_class_name, worker.gpus_per_replica)

    @property
    def gpus(self) -> int:
        """GPUs of all pods together, with the minimum number of engines."""
        trainers = self.trainers * (self.trainer.gpus_per_replica if self.trainer else 0)
        return trainers + self.samplers * self.sampler.gpus_per_replica

    @property
    def most_gpus(self) -> int:
        """GPUs of all pods together, with the maximum number of engines."""
        return self.gpus + (self.most_samplers - self.samplers) * self.sampler.gpus_per_replica

    @property
    def groups(self) -> int:
        """Number of worker groups plus the head.

        A pod with engines is a group of its own, since only that gives it a stable host name.
        """
        trainers = self.trainers if self.engines_per_trainer else min(1, self.trainers)
        return 1 + trainers + self.samplers

    def role_placement(self, component: str) -> RolePlacement | None:
        """Return the component's own placement (`head`, `trainer` or `sampler`)."""
        if component == "head":
            return self.base_model.head.placement
        if component == "sampler":
            return self.sampler.placement
        return self.trainer.placement if self.trainer is not None else None

    def placement_of(self, component: str) -> Placement:
        """Return the effective placement of a component (`head`, `trainer`, `sampler`)."""
        return self.placement.of_role(self.role_placement(component))

    @property
    def pods(self) -> list[PodRequest]:
        """One entry for each component."""
        head = self.base_model.head
        kinds = [PodRequest("head", 1, head.resources, self.placement_of("head"), 0)]
        is_counted = self.devices is None
        if self.trainer is not None and self.trainers:
            gpus = self.trainer.gpus_per_replica if is_counted else 0
            containers: list[TrainerShape | SamplerShape]
            containers = [self.trainer, *[self.sampler] * self.engines_per_trainer]
            needed = _sum_resources(*[each.resources for each in containers])
            extended = total(each.extended_resources for each in containers)
            place = self.placement_of("trainer")
            kinds.append(PodRequest("trainer", self.trainers, needed, place, gpus, extended))
        if self.samplers:
            needed = _sum_resources(self.sampler.resources, RAY_NODE)
            gpus = self.sampler.gpus_per_replica if is_counted else 0
            extended = self.sampler.extended_resources
            place = self.placement_of("sampler")
            kinds.append(PodRequest("sampler", self.samplers, needed, place, gpus, extended))
        return kinds


def _sum_resources(*containers: Resources) -> Resources:
    """Return the total resources of a pod's containers; volumes are those of the first one."""
    if len(containers) == 1:
        return containers[0]
    cores = sum(parse_quantity(each.cpu) for each in containers)
    size = sum(parse_quantity(each.memory) for each in containers)
    return containers[0].model_copy(
        update={"cpu": f"{round(cores * 1000)}m", "memory": f"{round(size / 2**20)}Mi"}
    )


def resolve(
    spec: TrainingSessionSpec, base_model: BaseModelSpec | None, sessions_of_owner: int
) -> ResolvedSpec | Rejection:
    """Return what a session gets.

    Args:
        spec: the spec of the session.
        base_model: the active BaseModel; None if there is none of that name.
        sessions_of_owner: older live sessions with the same owner and BaseModel.
    """
    if base_model is None:
        return Rejection(
            Reason.BASE_MODEL_NOT_FOUND,
            f"spec.baseModel: no BaseModel in this namespace has modelName {spec.base_model!r}",
        )
    problems = missing_fields(base_model) or [
        *over_limit(spec, base_model),
        *_engine_count_conflict(spec, base_model),
        *_replanning_conflict(spec, base_model),
        *disallowed(spec, base_model),
    ]
    if problems:
        return Rejection(Reason.NOT_ALLOWED, "; ".join(problems))
    if (waits := _over_quota(spec, base_model, sessions_of_owner)) is not None:
        return waits
    models = pool_of(base_model).slots if spec.role == "Pool" else 1
    resolved = _with_parallelism(
        _apply_choices(spec, base_model), _planned_rank(spec, base_model), models
    )
    return (
        (_engine_rejection(resolved) or resolved)
        if isinstance(resolved, ResolvedSpec)
        else resolved
    )


def _planned_rank(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> int | None:
    """Return the rank to plan the trainers for; None for full fine-tuning."""
    if spec.role in SERVING_ROLES:
        return base_model.limits.max_lora_rank
    return None if spec.lora is None else spec.lora.rank


def trains_whole_model(spec: TrainingSessionSpec) -> bool:
    """Return whether a session trains one model by full fine-tuning."""
    return spec.role == "Trainer" and spec.lora is None


def missing_fields(base_model: BaseModelSpec) -> list[str]:
    """Return required fields that a BaseModel lacks: older CRDs did not enforce them."""
    trainer, sampler = base_model.trainer, base_model.sampler
    found = []
    if trainer.replicas and not trainer.ranks_per_replica:
        found.append(
            f"the BaseModel's trainer.replicas: got {trainer.replicas}, but neither gpusPerReplica"
            " nor cpuRanksPerReplica is set; set one of them"
        )
    if sampler.engines is None:
        return found
    if sampler.image is None:
        found.append(
            "the BaseModel's sampler.image: required for engines; set an image that contains SGLang"
        )
    if sampler.colocated and not sampler.gpus_per_replica:
        found.append("the BaseModel's sampler.gpusPerReplica: colocated engines require 1 or more")
    if sampler.colocated and sampler.engines.device_class_name is None:
        found.append(
            "the BaseModel's sampler.engines.deviceClassName: required for colocated engines, which"
            " share GPUs through devices of this class"
        )
    return found


def check_pod_groups(resolved: ResolvedSpec, max_groups: int) -> ResolvedSpec | Rejection:
    """Return the spec, or a rejection if it has more pod groups than Kueue accepts.

    Args:
        resolved: the resolved spec of a session.
        max_groups: pod groups that Kueue accepts in one workload.
    """
    surplus = resolved.groups - max_groups
    if resolved.placement.queue_name is not None and resolved.sampler.is_scaled:
        return Rejection(
            Reason.NOT_ALLOWED,
            "the BaseModel's sampler.engines.maxReplicas: not supported with queue"
            f" {resolved.placement.queue_name!r}, because Kueue restarts a session whose number of"
            " pods changes; set sampler.replicas instead, or use no queue",
        )
    if resolved.placement.queue_name is None or surplus <= 0:
        return resolved
    is_shared = resolved.engines_per_trainer > 0
    kind, pods = ("trainer", resolved.trainers) if is_shared else ("sampler", resolved.samplers)
    return Rejection(
        Reason.NOT_ALLOWED,
        f"spec.{kind}.replicas: with {pods} pods for engines, the session has {resolved.groups} pod"
        f" groups, but Kueue accepts at most {max_groups} per workload"
        f" (TINKERCLOUD_OPERATOR_KUEUE_GROUPS); request at most {pods - surplus}",
    )


def idle_policy(spec: TrainingSessionSpec, base_model: BaseModelSpec | None) -> Idle | None:
    """Return the idle policy; None if it would come from a BaseModel that does not exist."""
    return spec.idle or (base_model.sessions.idle if base_model is not None else None)


def max_lifetime(spec: TrainingSessionSpec, base_model: BaseModelSpec | None) -> int | None:
    """Return the maximum lifetime in seconds; None for no limit, as for a cluster of a pool."""
    if spec.role in SERVING_ROLES:
        return None
    allowed = base_model.sessions.max_lifetime_seconds if base_model is not None else None
    lifetimes = (spec.max_lifetime_seconds, allowed)
    return min((life for life in lifetimes if life is not None), default=None)


def _engine_count_conflict(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    """Return problems with an explicit number of engines that run in the trainer pods."""
    resolved, requested = _apply_choices(spec, base_model), spec.sampler and spec.sampler.replicas
    if not resolved.engines_per_trainer or requested in {None, resolved.sampler.replicas}:
        return []
    return [
        f"spec.sampler.replicas: got {requested}, but the BaseModel's engines run in the trainer"
        f" pods, and {resolved.trainers} trainer pods hold {resolved.sampler.replicas} engines;"
        " omit this field, and set spec.trainer.replicas instead"
    ]


def _replanning_conflict(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    """Return problems with fewer trainers, whose new plan may need more GPU memory."""
    resolved, offered = _apply_choices(spec, base_model), base_model.trainer.replicas
    is_open = resolved.trainer is not None and resolved.trainer.planning is not None
    if not is_open or not resolved.engines_per_trainer or resolved.trainers >= offered:
        return []
    return [
        f"spec.trainer.replicas: got {resolved.trainers}, but the BaseModel plans its parallelism"
        f" (trainer.planning) for {offered} pods; fewer pods could need more memory per GPU than"
        " sampler.engines leaves free; omit this field"
    ]


def _over_quota(
    spec: TrainingSessionSpec, base_model: BaseModelSpec, sessions_of_owner: int
) -> Rejection | None:
    """Return a rejection with the queue position if the owner is at its session limit."""
    limit = base_model.limits.max_sessions_per_owner
    if limit is None or sessions_of_owner < limit or spec.role in SERVING_ROLES:
        return None
    return Rejection(
        Reason.QUOTA_EXCEEDED,
        f"spec.owner: {spec.owner!r} has {sessions_of_owner} older live sessions of this BaseModel,"
        f" and the limit is {limit}; this session is number {sessions_of_owner - limit + 1} in the"
        " owner's queue; finish or delete another session",
    )


def _apply_choices(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> ResolvedSpec:
    chosen = (spec.trainer.model_dump(exclude_none=True) if spec.trainer else {}) or {}
    trainer = base_model.trainer.model_copy(update=chosen) if spec.role != "Sampler" else None
    places = {"queue_name": spec.queue_name, "priority_class_name": spec.priority_class_name}
    return ResolvedSpec(
        base_model=base_model,
        trainer=trainer,
        sampler=_sampler(spec, base_model.sampler, trainer),
        placement=base_model.placement.model_copy(
            update={field: value for field, value in places.items() if value is not None}
        ),
        trains_whole_model=trains_whole_model(spec),
    )


def _sampler(
    spec: TrainingSessionSpec, offered: SamplerShape, trainer: TrainerShape | None
) -> SamplerShape:
    """Return the sampler; colocated engines become standalone in a session without trainers."""
    chosen = spec.sampler.model_dump(exclude_none=True) if spec.sampler else {}
    if offered.engines is not None and offered.is_scaled and chosen:
        most = chosen["replicas"]
        scaled = {"min_replicas": min(offered.least_replicas, most), "max_replicas": most}
        chosen = {"engines": offered.engines.model_copy(update=scaled)}
    sampler = offered.model_copy(update=chosen)
    if sampler.backend != "sglang" or not sampler.colocated:
        return sampler
    if trainer is None:
        return sampler.model_copy(update={"colocated": False})
    held = trainer.replicas * trainer.gpus_per_replica // sampler.gpus_per_replica
    return sampler.model_copy(update={"replicas": held})


def _with_parallelism(
    resolved: ResolvedSpec, lora_rank: int | None, models: int
) -> ResolvedSpec | Rejection:
    """Choose the parallelism, and the time to save, if the BaseModel leaves them open.

    Args:
        resolved: the resolved spec of a session.
        lora_rank: rank of the adapters; None for full fine-tuning.
        models: number of models that the session's head serves at the same time.
    """
    trainer = resolved.trainer
    if trainer is None or trainer.planning is None:
        return resolved
    base_model, sampler = resolved.base_model, resolved.sampler
    engine = Engine(max(1, sampler.gpus_per_replica), base_model.limits.max_lora_rank)
    plan = _plan(
        trainer,
        base_model.max_context_length,
        lora_rank,
        engine if resolved.engines_per_trainer else None,
    )
    if isinstance(plan, Rejection):
        return plan
    chosen = {
        "parallelism": plan.parallelism,
        "max_batch_tokens": min(trainer.max_batch_tokens, plan.max_batch_tokens),
    }
    head = base_model.head
    seconds = head.suspend_seconds or suspend_seconds(models * plan.state_bytes)
    timed = head.model_copy(update={"suspend_seconds": seconds})
    return replace(
        resolved,
        base_model=base_model.model_copy(update={"head": timed}),
        trainer=trainer.model_copy(update=chosen),
        plan=str(plan)[:MAX_MESSAGE_LENGTH],
    )


def _engine_rejection(resolved: ResolvedSpec) -> Rejection | None:
    """Return why engines with their own GPUs cannot hold the model, if that is known."""
    planning, engines = resolved.base_model.trainer.planning, resolved.sampler.engines
    if planning is None or engines is None or resolved.engines_per_trainer:
        return None
    # Adapter slots are smaller if only some modules are named; by how much is not known here.
    rank = 1 if engines.lora_target_modules else resolved.base_model.limits.max_lora_rank
    gpus = resolved.sampler.gpus_per_replica
    return _engine(planning, resolved.base_model.max_context_length, rank, gpus)


# Sessions are reconciled often, and those of a BaseModel mostly have the same spec. Planning takes
# longest when nothing fits.
@functools.lru_cache(maxsize=256)
def _plan(
    trainer: TrainerShape, sequence_length: int, lora_rank: int | None, colocated: Engine | None
) -> TrainerPlan | Rejection:
    try:
        return plan_parallelism(trainer, sequence_length, lora_rank, colocated)
    except DoesNotFit as error:
        return Rejection(Reason.NEVER_FITS, str(error))
    except ValueError as error:
        return Rejection(Reason.NOT_ALLOWED, f"the BaseModel's trainer.planning: {error}")


@functools.lru_cache(maxsize=256)
def _engine(
    planning: Planning, sequence_length: int, lora_rank: int, gpus: int
) -> Rejection | None:
    try:
        check_engine(planning, sequence_length, lora_rank, gpus)
    except DoesNotFit as error:
        message = f"the BaseModel's sampler.gpusPerReplica: {error}"
        return Rejection(Reason.NEVER_FITS, message)
    except ValueError:
        # A session that trains was already rejected for this; others need no plan.
        return None
    return None
