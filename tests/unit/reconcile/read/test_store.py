"""The cache of the cluster: the newest version wins, whatever its source."""

import random
from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.spec.observed import ChildKey
from tinkercloud_testing.resources.sessions import (
    NOON,
    Json,
    a_base_model,
    a_base_model_manifest,
    a_session_manifest,
    snapshot,
)

SERVICE = ChildKey("Service", "one-head")


def stored(manifest: Json, version: int = 1, uid: str = "", age: float = 0, **meta: Any) -> Json:
    """Return an object with the metadata that the API server adds."""
    metadata = {
        **manifest["metadata"],
        "uid": uid or f"uid-of-{manifest['metadata']['name']}",
        "resourceVersion": str(version),
        "creationTimestamp": timestamp(NOON - timedelta(seconds=age)),
        **meta,
    }
    return {**manifest, "metadata": metadata}


def session(name: str = "one", version: int = 1, **others: Any) -> Json:
    return stored(a_session_manifest(name), version, **others)


def service(version: int = 1, uid: str = "s", session: str = "one", **spec: Any) -> Json:
    metadata = {"name": "one-head", "labels": {labels.SESSION_LABEL: session}}
    return stored({"metadata": metadata, "spec": spec}, version, uid)


def children(watched: Watched) -> dict[ChildKey, Any]:
    found = snapshot(watched)
    assert found is not None
    return dict(found.children.own)


@pytest.fixture
def watched() -> Watched:
    """A cache with one session."""
    made = Watched()
    made.note("TrainingSession", session())
    return made


def test_a_changed_child_enqueues_its_session(watched: Watched) -> None:
    assert watched.note("Service", service()) == {"one"}
    assert watched.note("Service", service(session="unknown", uid="x")) == set()
    assert children(watched).keys() == {SERVICE}


def test_a_child_that_changes_its_session_concerns_both_and_belongs_to_the_new_one(
    watched: Watched,
) -> None:
    watched.note("TrainingSession", session("two"))
    watched.note("Service", service(7))

    concerned = watched.note("Service", service(8, session="two"))

    found = snapshot(watched, "two")
    assert concerned == {"one", "two"}
    assert children(watched) == {}
    assert found is not None
    assert found.children.own.keys() == {SERVICE}


def test_a_late_event_does_not_overwrite_a_newer_version(watched: Watched) -> None:
    watched.note("Service", service(7, port=2))

    concerned = watched.note("Service", service(6, port=1))

    assert concerned == set()
    assert children(watched)[SERVICE]["spec"] == {"port": 2}


def test_the_watch_event_of_our_own_write_enqueues_nothing(watched: Watched) -> None:
    watched.note("Service", service(7))

    assert watched.note("Service", service(7)) == set()


def test_a_late_event_does_not_restore_a_deleted_object(watched: Watched) -> None:
    watched.note("Service", service(7))
    watched.note("Service", service(8), is_gone=True)

    watched.note("Service", service(7))

    assert children(watched) == {}


def test_a_deletion_does_not_remove_a_successor_with_the_same_name(
    watched: Watched,
) -> None:
    watched.note("Service", service(7, uid="first"))
    watched.note("Service", service(9, uid="second"))

    watched.note("Service", service(8, uid="first"), is_gone=True)

    assert children(watched)[SERVICE]["metadata"]["uid"] == "second"


def test_a_late_event_does_not_overwrite_a_successor_with_the_same_name(
    watched: Watched,
) -> None:
    watched.note("Service", service(9, uid="second"))

    concerned = watched.note("Service", service(8, uid="first"))

    assert concerned == set()
    assert children(watched)[SERVICE]["metadata"]["uid"] == "second"


def test_objects_missing_from_a_full_list_are_removed(watched: Watched) -> None:
    watched.note("Service", service(7))

    concerned = watched.replace("Service", [], version=8)

    assert concerned == {"one"}
    assert children(watched) == {}


def test_objects_created_after_a_full_list_are_kept(watched: Watched) -> None:
    watched.note("Service", service(9))

    concerned = watched.replace("Service", [], version=8)

    assert concerned == set()
    assert children(watched).keys() == {SERVICE}


def test_a_full_list_of_one_kind_does_not_affect_others(watched: Watched) -> None:
    watched.note("Service", service(7))

    watched.replace("ConfigMap", [], version=8)

    assert children(watched).keys() == {SERVICE}


def test_a_changed_base_model_enqueues_its_sessions(watched: Watched) -> None:
    watched.note("TrainingSession", stored(a_session_manifest("two", baseModel="other")))

    concerned = watched.note("BaseModel", stored(a_base_model_manifest()))

    found = snapshot(watched)
    assert concerned == {"one"}
    assert found is not None
    assert found.base_model == a_base_model()


def test_the_older_of_two_base_models_with_one_name_is_active(watched: Watched) -> None:
    for name, age, context in (("b", 60, 16), ("a", 0, 32)):
        offered = a_base_model_manifest(name, maxContextLength=context)
        watched.note("BaseModel", stored(offered, age=age))

    found = snapshot(watched)

    assert found is not None
    assert found.base_model is not None
    assert found.base_model.max_context_length == 16


def test_older_live_sessions_of_the_same_owner_and_model_are_counted(watched: Watched) -> None:
    limited = a_base_model_manifest(limits={"maxSessionsPerOwner": 5})
    watched.note("BaseModel", stored(limited))
    others = {
        "older": session("older", age=60),
        "finished": session("finished", age=60) | {"status": {"finishedTime": "2026"}},
        "younger": session("younger", age=-60),
        "another owners": stored(a_session_manifest("other", owner="bob"), age=60),
        "another model": stored(a_session_manifest("model", baseModel="x"), age=60),
    }
    for other in others.values():
        watched.note("TrainingSession", other)

    found = snapshot(watched)

    assert found is not None
    assert found.limits.sessions_of_owner == 1


def test_session_counts_follow_creation_finish_and_deletion(watched: Watched) -> None:
    limited = a_base_model_manifest(limits={"maxSessionsPerOwner": 5})
    watched.note("BaseModel", stored(limited))
    rng, version = random.Random(0), 10
    for _ in range(400):
        version += 1
        name, owner = f"s{rng.randrange(12)}", rng.choice(["ada", "bob"])
        known = watched.sessions.get(name)
        made = stored(a_session_manifest(name, owner=owner), version, uid=f"{name}-{version}")
        other = made if known is None else {**known, "metadata": {**known["metadata"]}}
        other["metadata"]["resourceVersion"] = str(version)
        other["metadata"].setdefault("creationTimestamp", timestamp(NOON))
        if rng.random() < 0.3:
            other = {**other, "status": {"finishedTime": "2026"}}
        watched.note("TrainingSession", other, is_gone=known is not None and rng.random() < 0.3)

        for each in watched.sessions.values():
            found = snapshot(watched, each["metadata"]["name"])
            assert found is not None
            assert found.limits.sessions_of_owner == count_by_scan(watched, each)
    assert {item["metadata"]["name"] for item in watched.sessions_of("Qwen/Qwen3-8B")} == set(
        watched.sessions
    )


def count_by_scan(watched: Watched, session: Manifest) -> int:
    def age(item: Any) -> tuple[str, str]:
        return item["metadata"]["creationTimestamp"], item["metadata"]["name"]

    return sum(
        item["spec"]["owner"] == session["spec"]["owner"]
        and "finishedTime" not in item.get("status", {})
        and age(item) < age(session)
        for item in watched.sessions.values()
    )


def written_by(manager: str, time: str) -> Json:
    owned: Json = {
        "f:metadata": {"f:annotations": {f"f:{labels.LAST_ACTIVITY}": {}, "f:other": {}}}
    }
    return {"manager": manager, "operation": "Update", "time": time, "fieldsV1": owned}


@pytest.mark.parametrize("clock", ["2025-12-31T12:00:00Z", "2026-01-05T12:00:00Z"])
def test_the_last_activity_has_kubernetes_time_regardless_of_clock_skew(
    watched: Watched, clock: str
) -> None:
    own = [
        written_by(labels.API_FIELD_MANAGER, "2026-01-01T11:59:00Z"),
        {"manager": labels.API_FIELD_MANAGER, "time": "2026-01-01T11:59:30Z", "fieldsV1": {}},
    ]
    annotations = {labels.LAST_ACTIVITY: clock}

    watched.note("TrainingSession", session(version=2, annotations=annotations, managedFields=own))

    found = snapshot(watched)
    assert found is not None
    assert found.session.last_activity == NOON - timedelta(minutes=1)


def test_the_last_activity_of_another_writer_has_its_own_time(watched: Watched) -> None:
    own = [written_by("kubectl-annotate", "2026-01-01T11:59:00Z")]
    annotations = {labels.LAST_ACTIVITY: "2026-01-01T10:00:00Z"}

    watched.note("TrainingSession", session(version=2, annotations=annotations, managedFields=own))

    found = snapshot(watched)
    assert found is not None
    assert found.session.last_activity == NOON - timedelta(hours=2)


def test_strings_shared_by_all_sessions_are_stored_once(watched: Watched) -> None:
    def text() -> str:
        return "".join(["a value that is read ", "from the network each time"])

    watched.note("Service", service(7, text=text()))
    watched.note("TrainingSession", session(version=9, annotations={"text": text()}))

    kept = [
        children(watched)[SERVICE]["spec"]["text"],
        watched.sessions["one"]["metadata"]["annotations"]["text"],
    ]
    assert kept[0] is kept[1]


def test_sessions_with_pods_on_a_node_are_found(watched: Watched) -> None:
    metadata = {"name": "one-head", "labels": {labels.SESSION_LABEL: "one"}}
    watched.note("Pod", stored({"metadata": metadata, "spec": {"nodeName": "a"}, "status": {}}))

    assert watched.children.with_pods_on(frozenset({"a", "b"})) == ["one"]
    assert watched.children.with_pods_on(frozenset({"b"})) == []


@pytest.mark.parametrize(
    ("taints", "annotations", "leaves"),
    [
        (None, {}, True),
        ([], {}, False),
        ([], {labels.LEAVE_NODE: "a"}, True),
        ([], {labels.LEAVE_NODE: "another"}, False),
    ],
    ids=["by default", "its BaseModel says stay", "it is asked to", "asked to leave another node"],
)
def test_a_session_must_leave_a_cordoned_node_as_its_base_model_says(
    watched: Watched, taints: list[str] | None, annotations: dict[str, str], *, leaves: bool
) -> None:
    sessions: dict[str, Any] = {} if taints is None else {"sessions": {"leaveTaints": taints}}
    watched.note("BaseModel", stored(a_base_model_manifest(**sessions)))
    watched.note("TrainingSession", session(version=2, annotations=annotations))
    metadata = {"name": "one-head", "labels": {labels.SESSION_LABEL: "one"}}
    watched.note("Pod", stored({"metadata": metadata, "spec": {"nodeName": "a"}, "status": {}}))

    assert watched.must_leave("one", frozenset({"a"})) == leaves
    assert not watched.must_leave("one", frozenset({"b"}))


def test_a_snapshot_has_deletion_finalizer_and_activity(watched: Watched) -> None:
    metadata: Json = {
        "deletionTimestamp": "2026-01-01T12:00:00Z",
        "finalizers": [labels.FINALIZER, "another"],
        "annotations": {labels.LAST_ACTIVITY: "2026-01-01T12:00:00Z"},
        "generation": 4,
    }
    watched.note("TrainingSession", session(version=2, **metadata))

    found = snapshot(watched)

    assert found is not None
    assert (found.session.deleted, found.session.last_activity) == (NOON, NOON)
    assert (found.session.has_finalizer, found.session.generation) == (True, 4)


@pytest.mark.parametrize(
    ("spec", "annotations", "is_declared"),
    [
        ({}, {}, True),
        ({"modelId": "s:train:0"}, {}, False),
        ({}, {labels.CREATED_FOR: "a sampling session"}, False),
    ],
    ids=["from Git", "a run", "samplers of a client"],
)
def test_a_session_is_declared_unless_the_api_server_created_it(
    watched: Watched, spec: Json, annotations: Json, is_declared: bool
) -> None:
    made = session("made", annotations=annotations)
    watched.note("TrainingSession", made | {"spec": {**made["spec"], **spec}})

    found = snapshot(watched, "made")

    assert found is not None
    assert found.session.is_declared is is_declared


def test_an_unknown_or_unreadable_session_has_no_snapshot(watched: Watched) -> None:
    watched.note("TrainingSession", session("broken") | {"spec": {"owner": 7}})

    assert snapshot(watched, "broken") is None
    assert snapshot(watched, "unknown") is None


def test_status_fields_of_a_newer_version_are_ignored(watched: Watched) -> None:
    later = {"phase": "Hibernating", "incarnation": "uid-0", "finishedTime": timestamp(NOON)}
    watched.note("TrainingSession", session(version=2) | {"status": later})

    found = snapshot(watched)

    assert found is not None
    status = found.session.status
    assert (status.incarnation, status.finished_time) == ("uid-0", timestamp(NOON))


def a_ray_cluster(uid: str, version: int, **meta: Any) -> Json:
    metadata = {"name": "one", "labels": {labels.SESSION_LABEL: "one"}}
    return stored({"metadata": metadata, "spec": {}}, version, uid, **meta)


def a_pod_of(ray_cluster: str) -> Json:
    owners = [{"kind": "RayCluster", "name": "one", "uid": ray_cluster}]
    metadata = {"name": "one-head", "labels": {labels.SESSION_LABEL: "one"}}
    return stored({"metadata": metadata | {"ownerReferences": owners}, "status": {}})


@pytest.mark.parametrize(
    ("clusters", "is_going"),
    [
        ([a_ray_cluster("its", 2)], False),
        ([a_ray_cluster("its", 2, deletionTimestamp="2026-01-01T12:00:00Z")], True),
        ([a_ray_cluster("another", 2)], True),
        ([], True),
    ],
    ids=["exists", "terminating", "another with its name", "deleted"],
)
def test_a_pod_of_a_deleted_ray_cluster_counts_as_terminating(
    watched: Watched, clusters: list[Json], is_going: bool
) -> None:
    watched.note("Pod", a_pod_of("its"))
    for cluster in clusters:
        watched.note("RayCluster", cluster)

    found = snapshot(watched)

    assert found is not None
    assert [pod.is_terminating for pod in found.pods.required] == [is_going]


def a_trainer(name: str, cluster: str = "its", age: float = 60, **status: Any) -> Json:
    manifest = a_pod_of(cluster)
    labelled = manifest["metadata"]["labels"] | {labels.COMPONENT_LABEL: "trainer"}
    created = timestamp(NOON - timedelta(seconds=age))
    own = {"name": name, "uid": name, "labels": labelled, "creationTimestamp": created}
    return {"metadata": manifest["metadata"] | own, "status": status}


FAILED: Json = {
    "phase": "Failed",
    "reason": "Evicted",
    "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": timestamp(NOON)}],
}
READY: Json = {"conditions": [{"type": "Ready", "status": "True"}]}


def last_failure(watched: Watched) -> str | None:
    found = snapshot(watched)
    assert found is not None
    return found.pods.failed.name if found.pods.failed is not None else None


def test_a_pod_that_failed_and_was_deleted_at_once_is_remembered(watched: Watched) -> None:
    watched.note("RayCluster", a_ray_cluster("its", 2))
    watched.note("Pod", a_trainer("sibling", **READY))
    watched.note("Pod", a_trainer("lost"))

    watched.note("Pod", a_trainer("lost", **FAILED), is_gone=True)

    found = snapshot(watched)
    assert found is not None
    assert [pod.name for pod in found.pods.required] == ["sibling"]
    assert last_failure(watched) == "lost"


def test_a_failed_pod_is_forgotten_once_its_replacement_is_ready(
    watched: Watched,
) -> None:
    watched.note("RayCluster", a_ray_cluster("its", 2))
    watched.note("Pod", a_trainer("lost", **FAILED))
    watched.note("Pod", a_trainer("next", age=-1))
    assert last_failure(watched) == "lost"

    for version, status in (("2", READY), ("3", {})):
        pod = a_trainer("next", age=-1, **status)
        watched.note("Pod", pod | {"metadata": pod["metadata"] | {"resourceVersion": version}})

        assert last_failure(watched) is None


def test_failed_pods_of_a_deleted_session_are_not_remembered(watched: Watched) -> None:
    watched.note("TrainingSession", session(version=9), is_gone=True)

    watched.note("Pod", a_trainer("lost", **FAILED), is_gone=True)

    assert watched.children.failures == {}


def test_a_failed_pod_is_forgotten_with_its_ray_cluster_and_session(watched: Watched) -> None:
    watched.note("RayCluster", a_ray_cluster("its", 2))
    watched.note("Pod", a_trainer("lost", **FAILED), is_gone=True)
    assert last_failure(watched) == "lost"

    watched.note("RayCluster", a_ray_cluster("its", 3), is_gone=True)
    watched.note("RayCluster", a_ray_cluster("another", 4))

    assert last_failure(watched) is None
    watched.note("TrainingSession", session(version=9), is_gone=True)
    assert watched.children.failures == {}


@pytest.mark.parametrize(
    ("owner", "is_its_own"), [("uid-of-one", True), ("uid-of-an-earlier-one", False)]
)
def test_children_of_a_deleted_session_with_the_same_name_are_predecessors(
    watched: Watched, owner: str, is_its_own: bool
) -> None:
    owned = service()
    owners = [{"kind": "TrainingSession", "name": "one", "uid": owner}]
    owned["metadata"]["ownerReferences"] = owners

    watched.note("Service", owned)

    found = snapshot(watched)
    assert found is not None
    assert (SERVICE in found.children.own) is is_its_own
    assert (SERVICE in found.children.predecessors) is not is_its_own


def test_managed_fields_are_removed(watched: Watched) -> None:
    watched.note("TrainingSession", session(version=2, managedFields=[{"manager": "x"}]))

    assert "managedFields" not in watched.sessions["one"]["metadata"]


@pytest.mark.parametrize("is_gone", [True, False], ids=["deleted", "finished"])
def test_the_end_of_a_session_enqueues_its_siblings(watched: Watched, is_gone: bool) -> None:
    watched.note("TrainingSession", session("waiting", age=1))
    watched.note("TrainingSession", stored(a_session_manifest("grace-s", owner="grace")))
    finished = {"finishedTime": timestamp(NOON)}

    ended = {**session(version=2), "status": finished}
    concerned = watched.note("TrainingSession", ended, is_gone=is_gone)

    assert concerned - {"one"} == {"waiting"}


def test_a_child_with_an_edited_label_still_belongs_to_its_session(watched: Watched) -> None:
    owners = [{"kind": "TrainingSession", "name": "one", "uid": "uid-of-one"}]
    edited = service(session="another")
    edited["metadata"]["ownerReferences"] = owners

    assert watched.note("Service", edited) == {"one"}
    assert children(watched).keys() == {SERVICE}


def test_only_the_state_of_a_pod_is_kept(watched: Watched) -> None:
    metadata = {"name": "one-head", "labels": {labels.SESSION_LABEL: "one"}}
    watched.note("Pod", stored({"metadata": metadata, "spec": {"a": "lot"}, "status": {}}))

    [kept] = watched._child_objects["Pod"].values()
    assert kept["spec"] == {}


@pytest.mark.parametrize(
    ("owners", "is_there"), [(["TrainingSession", "Secret"], True), (["TrainingSession"], False)]
)
def test_a_secret_exists_as_long_as_its_marker_references_it(
    watched: Watched, owners: list[str], is_there: bool
) -> None:
    named = [{"kind": kind, "name": "one", "uid": "uid-of-one"} for kind in owners]
    metadata = {"name": "one-token", "ownerReferences": named}

    concerned = watched.note("ConfigMap", stored({"metadata": metadata}))

    found = snapshot(watched)
    assert concerned == {"one"}
    assert found is not None
    assert found.children.has_secret is is_there


def test_a_session_without_a_marker_has_no_secret(watched: Watched) -> None:
    found = snapshot(watched)

    assert found is not None
    assert not found.children.has_secret
