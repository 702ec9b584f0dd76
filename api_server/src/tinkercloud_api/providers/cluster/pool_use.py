"""What the pods of a BaseModel, and the clusters of its pool, are used for."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from tinkercloud_api.providers.cluster.session_status import BaseModelView, TrainingSessionView
from tinkercloud_crds.base_model import DEFAULT_SLOTS, PoolStatus
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.idle_gpus import MONTHS
from tinkercloud_protocol.responses.listings import GpuUse, PoolClusterUse, PoolUse


def gpu_use(base_model: BaseModelView, now: datetime) -> GpuUse:
    """Return the GPUs that a BaseModel holds, with its idle hours until now (UTC)."""
    idle = base_model.idle.at(now)
    latest = (now, now.replace(day=1) - timedelta(days=1))
    months = {f"{each:%Y-%m}": 0.0 for each in latest} | idle.gpu_hours_by_month
    return GpuUse(
        gpus=base_model.gpus,
        idle_gpus=idle.gpus,
        idle_gpu_hours=idle.gpu_hours,
        idle_gpu_hours_by_month=dict(sorted(months.items(), reverse=True)[:MONTHS]),
    )


def pools_in_use(
    base_models: Iterable[BaseModelView], sessions: Iterable[TrainingSessionView], now: datetime
) -> Mapping[str, PoolUse]:
    """Return the use of the pools of BaseModels until now (UTC), by name of the model.

    Of two BaseModels with one model name, the last counts.
    """
    load, clusters = Counter[str | None](), defaultdict[str, list[TrainingSessionView]](list)
    for each in sessions:
        load[each.spec.pool_cluster] += 1
        if each.spec.role == "Pool":
            clusters[each.spec.base_model].append(each)
    by_name = {each.spec.model_name: each for each in base_models}
    return {
        name: _pool_use(each, each.pool, clusters[name], load, now)
        for name, each in by_name.items()
        if each.pool is not None
    }


def _pool_use(
    base_model: BaseModelView,
    status: PoolStatus,
    clusters: Iterable[TrainingSessionView],
    load: Counter[str | None],
    now: datetime,
) -> PoolUse:
    pool = base_model.spec.pool
    slots = pool.slots if pool is not None else DEFAULT_SLOTS
    return PoolUse(
        clusters=status.clusters,
        ready=status.ready,
        slots=status.slots,
        models=status.models,
        waiting=status.waiting,
        by_cluster=[
            _cluster_use(each, status.slots_by_cluster.get(each.name, slots), load[each.name], now)
            for each in sorted(clusters, key=lambda each: each.name)
        ],
    )


def _cluster_use(
    cluster: TrainingSessionView, slots: int, models: int, now: datetime
) -> PoolClusterUse:
    since = cluster.gpus_idle_since
    # Clocks differ.
    idle = max(now - since, timedelta(0)) if since is not None else timedelta(0)
    return PoolClusterUse(
        name=cluster.name,
        state=_state_of(cluster),
        slots=slots,
        models=models,
        gpus=cluster.gpus,
        idle_since=since,
        idle_gpu_hours=round(cluster.gpus * idle.total_seconds() / 3600, 4),
    )


def _state_of(cluster: TrainingSessionView) -> str:
    """Return the reason of the Ready condition alone: its message may name runs of others."""
    ready = find(cluster.conditions, ConditionType.READY)
    if cluster.is_deleted:
        return Reason.TERMINATING
    return ready.reason if ready is not None else "Pending"
