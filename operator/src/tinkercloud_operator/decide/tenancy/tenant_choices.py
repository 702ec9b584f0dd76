"""The queue and the PriorityClass of a session, as its owner's Tenant allows. Pure."""

from dataclasses import replace

from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_crds.training_session import SERVING_ROLES, TrainingSessionSpec
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec


def choices_of_tenant(
    spec: TrainingSessionSpec, resolved: ResolvedSpec, tenant: TenantSpec | None
) -> ResolvedSpec | Rejection:
    """Return what a session gets within what its tenant allows.

    A session that chooses nothing, and whose BaseModel's own choice is not allowed, gets the first
    choice that the tenant allows.

    Args:
        spec: the session's specification.
        resolved: what it gets without a tenant.
        tenant: the tenant of its owner, if it has one.
    """
    if tenant is None or spec.role in SERVING_ROLES:
        return resolved
    placement = resolved.placement
    choices = (
        ("queueName", spec.queue_name, placement.queue_name, tenant.allowed_queues),
        (
            "priorityClassName",
            spec.priority_class_name,
            placement.priority_class_name,
            tenant.allowed_priority_classes,
        ),
    )
    chosen = []
    for field, requested, offered, allowed in choices:
        if allowed is None or offered in allowed:
            chosen.append(offered)
        elif requested is not None or not allowed:
            listed = ", ".join(sorted(allowed)) or "none"
            message = (
                f"spec.{field}: {offered!r} is not allowed by the Tenant of owner {spec.owner!r};"
                f" allowed values: {listed}"
            )
            return Rejection(Reason.NOT_ALLOWED, message)
        else:
            chosen.append(allowed[0])
    update = {"queue_name": chosen[0], "priority_class_name": chosen[1]}
    return replace(resolved, placement=placement.model_copy(update=update))
