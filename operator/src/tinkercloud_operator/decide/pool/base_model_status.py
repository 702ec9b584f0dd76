"""The status of a BaseModel: whether it is active, and what its sessions use. Pure."""

from collections.abc import Sequence
from datetime import datetime

from tinkercloud_crds.base_model import BaseModelStatus, PoolStatus, SparesStatus
from tinkercloud_crds.conditions import ConditionStatus, ConditionType, Reason, moved
from tinkercloud_crds.idle_gpus import IdleGpus
from tinkercloud_crds.times import parse_time
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pool.pool_facts import is_cluster
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.spec.parallelism import planning_problem

_NO_PODS = frozenset({"Suspended", "Finished"})


def base_model_status(
    base_model: Manifest,
    active: Manifest | None,
    sessions: Sequence[Manifest],
    now: datetime,
    *,
    pool: PoolStatus | None = None,
    spares: SparesStatus | None = None,
) -> BaseModelStatus:
    """Return the status of a BaseModel.

    Args:
        base_model: the BaseModel.
        active: the active BaseModel of this model name.
        sessions: all sessions of this model name.
        now: the current time.
        pool: the status of its pool, if it has one.
        spares: the status of its warm spares, if it has any.
    """
    previous = BaseModelStatus.model_validate(base_model.get("status", {}))
    generation = base_model["metadata"].get("generation", 0)
    reason, message = _problem(base_model, active)
    is_ready = reason is Reason.ACCEPTED
    truths: dict[ConditionType, ConditionStatus] = {
        ConditionType.READY: "True" if is_ready else "False",
        ConditionType.RECONCILING: "False",
        ConditionType.STALLED: "False" if is_ready else "True",
    }
    # Sessions belong to the active BaseModel.
    its_own = sessions if reason is not Reason.DUPLICATE else []
    statuses = [session.get("status", {}) for session in its_own]
    idle_gpus = sum(status.get("gpus", 0) for status in statuses if "idleSince" in status)
    idle = previous.idle
    if idle_gpus != idle.gpus:
        # Counted only then, so that nothing is written while nothing changes.
        idle = idle.at(now).model_copy(update={"gpus": idle_gpus})
    return BaseModelStatus(
        observed_generation=generation,
        conditions=[
            moved(
                previous.conditions,
                kind,
                truth,
                Reason.STABLE if kind is ConditionType.RECONCILING else reason,
                message,
                generation=generation,
                now=now,
            )
            for kind, truth in truths.items()
        ],
        live_sessions=sum(
            session.get("status", {}).get("phase") not in _NO_PODS
            for session in its_own
            if not is_cluster(session)
        ),
        gpus=sum(status.get("gpus", 0) for status in statuses),
        idle=idle,
        pool=pool if reason is not Reason.DUPLICATE else None,
        spares=spares if reason is not Reason.DUPLICATE else None,
    )


def after_a_gap(base_model: Manifest, sessions: Sequence[Manifest]) -> Manifest:
    """Return a BaseModel whose idle GPUs are only those that were idle ever since `idle.since`.

    For the first look at it after a time without an operator. When the use of the others started is
    not known, so their hours since then do not count.

    Args:
        base_model: the BaseModel.
        sessions: all sessions of its model name.
    """
    status = base_model.get("status", {})
    idle = IdleGpus.model_validate(status.get("idle", {}))
    counted = parse_time(idle.since)
    if counted is None:
        return base_model
    unused = sum(
        each["status"].get("gpus", 0) for each in sessions if _is_idle_since(each, counted)
    )
    kept = idle.model_copy(update={"gpus": min(idle.gpus, unused)})
    return {**base_model, "status": {**status, "idle": kept.model_dump(by_alias=True)}}


def _is_idle_since(session: Manifest, moment: datetime) -> bool:
    """Return whether a session was idle at a moment, and has not been used since."""
    idle_since = parse_time(session.get("status", {}).get("idleSince"))
    used = parsing.last_activity(session)
    if idle_since is None or idle_since > moment:
        return False
    return used is None or used <= idle_since


def _problem(base_model: Manifest, active: Manifest | None) -> tuple[Reason, str]:
    spec = parsing.base_model(base_model)
    if spec is None:
        return Reason.NOT_ALLOWED, (
            "this version of the operator cannot read the spec; upgrade the operator or correct the"
            " spec"
        )
    if active is not None and active["metadata"]["uid"] != base_model["metadata"]["uid"]:
        name = active["metadata"]["name"]
        return (
            Reason.DUPLICATE,
            f"BaseModel {name!r} has the same modelName and is older, so it takes precedence",
        )
    problem = planning_problem(spec)
    return (Reason.ACCEPTED, "") if problem is None else (Reason.NOT_ALLOWED, problem)
