"""Sessions wait for the limits of their owner's Tenant, and start when there is room."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_crds.quota_fields import usage
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.decide.session.actions import Apply
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.decide.tenancy.device_claims import waits_for_nodes
from tinkercloud_operator.decide.tenancy.tenant_choices import choices_of_tenant
from tinkercloud_operator.decide.tenancy.tenant_status import tenant_status
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve
from tinkercloud_testing.resources.session_world import SETTINGS
from tinkercloud_testing.resources.sessions import (
    ENGINES,
    NOON,
    TRAINERS,
    Json,
    a_base_model,
    a_base_model_manifest,
    a_session_manifest,
    snapshot,
)

WAITS = [{"type": "QuotaReserved", "status": "False", "reason": "QuotaExceeded"}]
POOL_MEMBER: Json = {"sharing": "Shared", "modelId": "sdk:train:0"}


class Namespace:
    """The operator's cache of one namespace."""

    def __init__(self, **offer: Any) -> None:
        self.watched = Watched()
        self._version = 1
        manifest = a_base_model_manifest("model", trainer=TRAINERS, sampler=ENGINES, **offer)
        self.note("BaseModel", manifest)

    def note(
        self, kind: str, manifest: Json, second: int = 0, *, is_gone: bool = False
    ) -> set[str]:
        self._version += 1
        name = manifest["metadata"]["name"]
        metadata = {
            "uid": f"uid-{name}",
            "creationTimestamp": f"2026-01-01T12:00:{second:02}Z",
            **manifest["metadata"],
            "resourceVersion": str(self._version),
        }
        return self.watched.note(kind, {**manifest, "metadata": metadata}, is_gone=is_gone)

    def limit(self, **limits: int) -> set[str]:
        spec = {"owners": ["ada"], "limits": limits}
        return self.note("Tenant", {"metadata": {"name": "research"}, "spec": spec})

    def make(
        self, name: str, second: int, conditions: list[Json] | None = None, **spec: Any
    ) -> set[str]:
        manifest = {
            **a_session_manifest(name, **spec),
            "status": {"conditions": conditions or []},
        }
        return self.note("TrainingSession", manifest, second)

    def cluster(self, name: str, *, is_gone: bool = False) -> set[str]:
        owner = {"kind": "TrainingSession", "name": name, "uid": f"uid-{name}"}
        metadata = {"name": name, "uid": f"uid-ray-{name}", "ownerReferences": [owner]}
        return self.note("RayCluster", {"metadata": metadata, "spec": {}}, is_gone=is_gone)

    def end(self, name: str, second: int, **spec: Any) -> set[str]:
        manifest = a_session_manifest(name, **spec)
        return self.note("TrainingSession", manifest, second, is_gone=True)

    def admit(self, name: str) -> Observed:
        self.watched.admit(name)
        return self.observe(name)

    def observe(self, name: str) -> Observed:
        found = snapshot(self.watched, name)
        assert found is not None
        return found

    def waits(self, name: str) -> bool:
        return self.admit(name).limits.quota_message is not None


def test_the_second_session_waits_until_the_first_is_gone() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("first", 1)
    namespace.make("second", 2)

    assert not namespace.waits("first")
    plan = reconcile(namespace.admit("second"), SETTINGS)

    assert plan.status is not None
    ready = next(each for each in plan.status.conditions if each.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "QuotaExceeded")
    assert "tenant 'research' uses 1 of 1 sessions" in ready.message
    assert not any("RayCluster" in str(action) for action in plan.actions)
    assert namespace.end("first", 1) >= {"second"}
    assert not namespace.waits("second")


def test_two_sessions_never_start_at_once_even_before_their_pods_are_visible() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("b", 1)
    assert not namespace.waits("b")

    namespace.make("a", 1)

    assert namespace.waits("a")
    assert not namespace.waits("b")


def test_reading_a_session_reserves_nothing_for_it() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("b", 2)
    for _ in range(2):
        assert namespace.observe("b").limits.quota_message is None
        assert namespace.watched.may_start(namespace.watched.sessions["b"])

    namespace.make("a", 1)

    assert not namespace.waits("a")
    assert namespace.waits("b")


@settings(max_examples=60, deadline=None)
@given(
    sessions=st.lists(
        st.tuples(st.sampled_from(["ada", "bob"]), st.integers(0, 9)), min_size=3, max_size=6
    ),
    limit=st.integers(1, 3),
    first=st.integers(0, 4),
    read=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    chosen=st.randoms(use_true_random=False),
)
def test_reading_sessions_in_any_order_changes_neither_quotas_nor_turns(
    sessions: list[tuple[str, int]], limit: int, first: int, read: list[int], chosen: Any
) -> None:
    namespace = Namespace()
    namespace.limit(sessions=limit)
    made = {f"s{number}": each for number, each in enumerate(sessions)}
    names, [late, (owner_of_late, second_of_late)] = [*made][:-1], made.popitem()
    for name, (owner, second) in made.items():
        namespace.make(name, second, owner=owner)
    namespace.admit(names[first % len(names)])
    unread = copy.deepcopy(namespace)

    for number in read:
        name = names[number % len(names)]
        namespace.observe(name)
        namespace.watched.may_start(namespace.watched.sessions[name])

    for each in (namespace, unread):
        each.make(late, second_of_late, owner=owner_of_late)
    order = [*names, late]
    chosen.shuffle(order)
    for name in order:
        assert namespace.admit(name) == unread.admit(name)


def test_sessions_of_other_owners_do_not_count() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("of-grace", 1, owner="grace")

    namespace.make("of-ada", 2)

    assert not namespace.waits("of-grace")
    assert not namespace.waits("of-ada")


def test_gpus_of_sessions_with_their_own_pods_are_limited_and_a_pool_needs_none() -> None:
    namespace = Namespace()
    needed = 0
    namespace.make("first", 1)
    [claimant] = all_claimants(namespace)
    needed = claimant.missing.dedicated_gpus
    assert needed > 0
    namespace.limit(dedicatedGpus=needed)
    assert not namespace.waits("first")
    namespace.cluster("first")

    namespace.make("second", 2)
    namespace.make("in-a-pool", 3, **POOL_MEMBER)

    assert namespace.waits("second")
    assert not namespace.waits("in-a-pool")
    assert "second" in namespace.cluster("first", is_gone=True)


def all_claimants(namespace: Namespace) -> list[Any]:
    namespace.limit()
    tenant = namespace.watched.quotas.tenant("ada")
    assert tenant is not None
    return namespace.watched.quotas.claimants(tenant)


def test_a_raised_limit_starts_those_that_wait_and_a_lowered_one_stops_nothing() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("first", 1)
    namespace.make("second", 2)
    assert not namespace.waits("first")
    assert namespace.waits("second")

    assert "second" in namespace.limit(sessions=2)
    assert not namespace.waits("second")
    namespace.cluster("first")
    namespace.cluster("second")
    namespace.limit(sessions=1)

    assert not namespace.waits("first")
    assert not namespace.waits("second")


def test_a_model_that_waits_gets_no_place_in_a_pool() -> None:
    namespace = Namespace(sharing="Shared")
    namespace.limit(models=0)
    namespace.make("run", 1, **POOL_MEMBER)

    plan = reconcile(namespace.admit("run"), SETTINGS)

    assert plan.status is not None or plan.actions
    assert namespace.waits("run")
    reasons = {each.reason for each in plan.status.conditions} if plan.status else set()
    assert "QuotaExceeded" in reasons


def test_a_session_that_waits_for_a_quota_does_not_make_others_wait_for_nodes() -> None:
    manifest = a_session_manifest("one")

    assert not waits_for_nodes({**manifest, "status": {"conditions": WAITS}})
    assert waits_for_nodes({**manifest, "status": {"conditions": []}})


@pytest.mark.parametrize("owner", ["ada", "grace"])
def test_the_clusters_of_pools_count_towards_no_limit(owner: str) -> None:
    namespace = Namespace()
    namespace.limit(sessions=0, dedicatedGpus=0)
    spec: Json = {"role": "Pool", "owner": owner, "lora": None}

    namespace.make("pool", 1, **spec)

    assert not namespace.waits("pool")


def test_the_status_of_a_tenant_shows_used_and_limit() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("first", 1)
    namespace.make("second", 2)
    namespace.waits("first")
    tenant = namespace.watched.quotas.tenant("ada")
    assert tenant is not None
    claimants = namespace.watched.quotas.claimants(tenant)

    manifest = {"metadata": {"generation": 3}}
    status = tenant_status(
        manifest, TenantSpec(owners=["ada"], limits={"sessions": 1}), claimants, NOON
    )

    assert usage(claimants).waiting == 1
    assert (status.session_summary, status.model_summary) == ("1/1", "0/-")
    assert status.observed_generation == 3
    assert [each.reason for each in status.conditions] == ["QuotaExceeded"]


def queue_of(namespace: Namespace, name: str) -> tuple[str | None, str]:
    """Return the queue of a session's RayCluster, and the message of its status."""
    plan = reconcile(namespace.admit(name), SETTINGS)
    applied = [each.manifest for each in plan.actions if isinstance(each, Apply)]
    labels = [
        each["metadata"].get("labels", {}) for each in applied if each["kind"] == "RayCluster"
    ]
    queue = labels[0].get("kueue.x-k8s.io/queue-name") if labels else None
    return queue, (plan.status.message or "") if plan.status is not None else ""


def allow(namespace: Namespace, *queues: str) -> None:
    spec = {"owners": ["ada"], "allowedQueues": list(queues)}
    namespace.note("Tenant", {"metadata": {"name": "research"}, "spec": spec})


def test_a_session_that_chooses_no_queue_gets_the_first_one_of_its_tenant() -> None:
    namespace = Namespace(placement={"queueName": "everyone"})
    allow(namespace, "blue", "red")
    namespace.make("one", 1)
    namespace.make("of-grace", 2, owner="grace")

    assert queue_of(namespace, "one")[0] == "blue"
    assert queue_of(namespace, "of-grace")[0] == "everyone"


def test_a_queue_that_the_tenant_does_not_allow_is_refused() -> None:
    namespace = Namespace(sessions={"queueNames": ["red", "blue"]})
    allow(namespace, "blue")
    namespace.make("one", 1, queueName="red")
    namespace.make("two", 2, queueName="blue")

    queue, message = queue_of(namespace, "one")

    assert queue is None
    assert "spec.queueName: 'red' is not allowed by the Tenant of owner 'ada'" in message
    assert "allowed values: blue" in message
    assert queue_of(namespace, "two")[0] == "blue"


REJECTED = [{"type": "Accepted", "status": "False", "reason": "BaseModelNotFound"}]


def test_a_session_that_was_rejected_before_waits_for_the_limits_like_any_other() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("first", 1)
    assert not namespace.waits("first")

    namespace.make("second", 2, REJECTED)

    assert namespace.waits("second")


def test_a_session_that_is_rejected_now_reserves_nothing() -> None:
    namespace = Namespace()
    namespace.limit(sessions=1)
    namespace.make("first", 1, REJECTED, baseModel="unknown/model")
    assert not namespace.waits("first")

    namespace.make("second", 2)

    assert not namespace.waits("second")


def test_a_session_that_a_spare_served_holds_no_gpus_once_it_is_suspended() -> None:
    namespace = Namespace()
    namespace.limit(dedicatedGpus=64)
    namespace.make("first", 1)
    assert not namespace.waits("first")
    namespace.make("first", 1, poolCluster="spare-0")
    idle = {"type": "Suspended", "status": "True", "reason": "Idle"}
    namespace.make(
        "first", 1, [idle, {"type": "QuotaReserved", "status": "True", "reason": "NoQueue"}]
    )

    tenant = namespace.watched.quotas.tenant("ada")
    assert tenant is not None
    [claimant] = namespace.watched.quotas.claimants(tenant)

    assert claimant.held.dedicated_gpus == 0


def test_the_choices_of_a_tenant_do_not_concern_clusters_that_serve_others() -> None:
    tenant = TenantSpec(owners=["*"], allowedQueues=["theirs"])
    for role in ("Pool", "Spare"):
        spec = TrainingSessionSpec(base_model="m", role=role, owner="tinkercloud-pool")
        resolved = resolve(spec, a_base_model(), 0)
        assert isinstance(resolved, ResolvedSpec)

        assert choices_of_tenant(spec, resolved, tenant) is resolved
