"""What clients see of the GPUs of a BaseModel and of the clusters of its pool."""

from datetime import UTC, datetime
from typing import Any

from tinkercloud_api.providers.cluster.pool_use import gpu_use, pools_in_use
from tinkercloud_api.providers.cluster.session_status import (
    TrainingSessionView,
    read_base_model,
    read_session,
)
from tinkercloud_protocol.responses.listings import GpuUse, PoolClusterUse, PoolUse

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
BASE_MODEL: dict[str, Any] = {
    "metadata": {"name": "tiny", "resourceVersion": "1"},
    "spec": {
        "modelName": "tiny/llama",
        "source": {"hub": "tiny/llama"},
        "maxContextLength": 512,
        "head": {"image": "head"},
        "sharing": "Shared",
        "pool": {"slotsPerCluster": 8},
    },
}


def a_session(name: str, spec: dict[str, Any], **status: Any) -> TrainingSessionView:
    metadata = {
        "name": name,
        "uid": name,
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    owned = {"baseModel": "tiny/llama", "owner": "me", **spec}
    return read_session({"metadata": metadata, "spec": owned, "status": status})


def a_cluster(name: str, base_model: str = "tiny/llama", **status: Any) -> TrainingSessionView:
    return a_session(name, {"role": "Pool", "baseModel": base_model}, **status)


def a_run(name: str, cluster: str) -> TrainingSessionView:
    return a_session(name, {"sharing": "Shared", "poolCluster": cluster})


def a_condition(status: str, reason: str) -> dict[str, Any]:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "run-of-another-owner:train:0 is being saved",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-02T00:00:00Z",
    }


def test_a_pool_has_the_counts_that_the_operator_has_written_and_each_of_its_clusters() -> None:
    pool: dict[str, Any] = {"clusters": 2, "ready": 1, "models": 3, "slots": 12, "waiting": 3}
    pool |= {"slotsByCluster": {"pool-a": 4}, "gpus": 8, "fromTheFuture": 1}
    read = read_base_model({**BASE_MODEL, "status": {"pool": pool}})
    starting = a_cluster("pool-b", conditions=[a_condition("False", "Provisioning")])
    idle: dict[str, Any] = {"gpus": 4, "idleSince": "2026-11-01T10:30:00Z"}
    serving = a_cluster("pool-a", conditions=[a_condition("True", "Ready")], **idle)
    runs = [a_run("one", "pool-a"), a_run("two", "pool-a"), a_run("three", "pool-b")]

    sessions = [starting, serving, a_cluster("other", "tiny/other"), *runs]
    use = pools_in_use([read], sessions, NOW)

    assert use["tiny/llama"] == PoolUse(
        clusters=2,
        ready=1,
        models=3,
        slots=12,
        waiting=3,
        by_cluster=[
            PoolClusterUse(
                name="pool-a",
                state="Ready",
                slots=4,
                models=2,
                gpus=4,
                idle_since=datetime(2026, 11, 1, 10, 30, tzinfo=UTC),
                idle_gpu_hours=6,
            ),
            PoolClusterUse(name="pool-b", state="Provisioning", slots=8, models=1, gpus=0),
        ],
    )
    assert pools_in_use([read_base_model(BASE_MODEL)], [serving], NOW) == {}


def test_pools_of_several_base_models_have_their_own_clusters_from_one_list_of_sessions() -> None:
    status = {"pool": {"clusters": 1, "ready": 1, "models": 1, "slots": 8, "waiting": 0}}
    names = ("tiny/llama", "tiny/other")
    models = [
        read_base_model(
            {**BASE_MODEL, "spec": {**BASE_MODEL["spec"], "modelName": name}, "status": status}
        )
        for name in names
    ]
    sessions = [a_cluster("pool-a"), a_cluster("pool-b", "tiny/other"), a_run("one", "pool-b")]

    # An iterator can be read once.
    use = pools_in_use(models, iter(sessions), NOW)

    of_clusters = {name: [(e.name, e.models) for e in use[name].by_cluster] for name in names}
    assert of_clusters == {"tiny/llama": [("pool-a", 0)], "tiny/other": [("pool-b", 1)]}


def test_a_cluster_without_a_status_is_pending_and_one_whose_clock_is_ahead_has_no_idle_hours() -> (
    None
):
    read = read_base_model({**BASE_MODEL, "status": {"pool": {"clusters": 1}}})
    ahead = a_cluster("pool-a", gpus=4, idleSince="2026-11-01T12:00:09Z")

    use = pools_in_use([read], [ahead], NOW)["tiny/llama"]

    assert [(each.state, each.idle_gpu_hours) for each in use.by_cluster] == [("Pending", 0)]


def test_idle_gpu_hours_are_those_until_now_with_this_month_and_the_last_one_first() -> None:
    since = {"gpus": 4, "since": "2026-10-31T22:00:00Z"}
    counted = {"gpuHours": 11.5, "gpuHoursByMonth": {"2026-07": 1.5, "2026-10": 10}}
    status = {"gpus": 8, "idle": since | counted, "fromTheFuture": 1}
    read = read_base_model({**BASE_MODEL, "status": status})

    now = gpu_use(read, datetime(2026, 11, 1, 1, 0, tzinfo=UTC))
    later = gpu_use(read, datetime(2026, 12, 1, 0, 0, tzinfo=UTC))
    never = gpu_use(read_base_model(BASE_MODEL), datetime(2027, 1, 31, tzinfo=UTC))

    assert now == GpuUse(
        gpus=8,
        idle_gpus=4,
        idle_gpu_hours=11.5 + 8 + 4,
        idle_gpu_hours_by_month={"2026-11": 4, "2026-10": 18, "2026-07": 1.5},
    )
    assert list(now.idle_gpu_hours_by_month) == ["2026-11", "2026-10", "2026-07"]
    assert list(later.idle_gpu_hours_by_month) == ["2026-12", "2026-11", "2026-10", "2026-07"]
    assert later.idle_gpu_hours_by_month["2026-11"] == 4 * 30 * 24
    assert (never.gpus, never.idle_gpu_hours) == (0, 0)
    assert never.idle_gpu_hours_by_month == {"2027-01": 0, "2026-12": 0}


def test_at_most_thirteen_months_of_idle_hours_are_listed() -> None:
    months = {f"2026-{month:02}": float(month) for month in range(1, 13)} | {"2025-12": 0.5}
    read = read_base_model({**BASE_MODEL, "status": {"idle": {"gpuHoursByMonth": months}}})

    listed = gpu_use(read, datetime(2027, 6, 1, tzinfo=UTC)).idle_gpu_hours_by_month

    assert list(listed)[:3] == ["2027-06", "2027-05", "2026-12"]
    assert (len(listed), min(listed)) == (13, "2026-02")
