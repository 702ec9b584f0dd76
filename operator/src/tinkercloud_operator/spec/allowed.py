"""What a session may request of its BaseModel: pure."""

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.training_session import TrainingSessionSpec


def over_limit(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    """Return problems with numbers that exceed what the BaseModel offers."""
    trainer, sampler = base_model.trainer, base_model.sampler
    pairs = [
        ("lora.rank", spec.lora and spec.lora.rank, base_model.limits.max_lora_rank),
        ("trainer.replicas", spec.trainer and spec.trainer.replicas, trainer.replicas),
        (
            "trainer.maxBatchTokens",
            spec.trainer and spec.trainer.max_batch_tokens,
            base_model.limits.max_batch_tokens or trainer.max_batch_tokens,
        ),
        ("sampler.replicas", spec.sampler and spec.sampler.replicas, sampler.most_replicas),
        (
            "idle.timeoutSeconds",
            spec.idle and spec.idle.timeout_seconds,
            base_model.sessions.max_idle_timeout_seconds,
        ),
        (
            "maxLifetimeSeconds",
            spec.max_lifetime_seconds,
            base_model.sessions.max_lifetime_seconds,
        ),
    ]
    found = [
        f"spec.{field}: {requested} exceeds the BaseModel's limit of {limit}"
        for field, requested, limit in pairs
        if requested and limit is not None and requested > limit
    ]
    return found or _indivisible_ranks(spec, base_model)


def _indivisible_ranks(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    """Return problems with a number of trainers that the parallelism does not divide."""
    requested = spec.trainer and spec.trainer.replicas
    if not requested:
        return []
    parallelism = base_model.trainer.parallelism
    ranks = requested * base_model.trainer.ranks_per_replica
    together = parallelism.tensor * parallelism.pipeline
    groups = [
        ("model copy", together * parallelism.context),
        ("set of experts", together * parallelism.expert),
    ]
    return [
        f"spec.trainer.replicas: {requested} pods have {ranks} ranks, but the number of ranks must"
        f" be a multiple of {size}, the ranks per {what}"
        for what, size in groups
        if ranks % size
    ]


def disallowed(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    """Return problems with choices that the BaseModel does not allow."""
    return [
        *_disallowed_choices(spec, base_model),
        *_disallowed_program(spec, base_model),
        *_disallowed_sharing(spec, base_model),
    ]


def _disallowed_choices(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    placement, policy = base_model.placement, base_model.sessions
    choices = [
        ("queueName", spec.queue_name, placement.queue_name, policy.queue_names),
        (
            "priorityClassName",
            spec.priority_class_name,
            placement.priority_class_name,
            policy.priority_class_names,
        ),
    ]
    return [
        f"spec.{field}: {requested!r} is not allowed by the BaseModel; allowed values:"
        f" {', '.join(sorted({*offered, *([own] if own else [])})) or 'none'}"
        for field, requested, own, offered in choices
        if requested is not None and requested != own and requested not in offered
    ]


def _disallowed_program(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    program, offer = spec.program, base_model.programs
    if program is None:
        return []
    if offer is None:
        return [
            "spec.program: the BaseModel allows no programs; set its spec.programs, or remove"
            " spec.program"
        ]
    if program.image in {None, *offer.images}:
        return []
    return [
        f"spec.program.image: {program.image!r} is not allowed by the BaseModel; allowed values:"
        f" {', '.join(offer.images)}"
    ]


def _disallowed_sharing(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> list[str]:
    if spec.sharing == "Dedicated" or base_model.sharing == "Shared":
        return []
    return [
        "spec.sharing: got 'Shared', but the BaseModel has no pool; set its spec.sharing to Shared,"
        " or create a session with sharing Dedicated"
    ]
