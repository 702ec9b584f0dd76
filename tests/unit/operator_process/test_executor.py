"""Plans are executed stage by stage; failures are reported and retried."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tinkercloud_crds import labels
from tinkercloud_kube.errors import Conflict, Rejected, Unavailable
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator import metrics
from tinkercloud_operator.children.secret_marker import has_secret
from tinkercloud_operator.decide.session.actions import Delete, DeleteSession, Plan
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.run.cluster.executor import Executor
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.cluster.served_definitions import ServedDefinitions
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, Json, MemoryApi
from tinkercloud_testing.resources.sessions import NOON, a_pod, a_status, observed
from tinkercloud_testing.serving.metrics import metric_value

SESSION = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions/one"
RAY_CLUSTER = "/apis/ray.io/v1/namespaces/default/rayclusters/one"
SERVICE = "/api/v1/namespaces/default/services/one-head"
SECRET = "/api/v1/namespaces/default/secrets/one-token"
MARKER = "/api/v1/namespaces/default/configmaps/one-token"
ANOTHER_OWNER = [{"kind": "TrainingSession", "name": "one", "uid": "uid-of-an-earlier-one"}]


class Operator:
    """Reconciles one session."""

    def __init__(self, api: MemoryApi, heads: HeadClient, connection: Connection) -> None:
        self.api = api
        self.children: dict[ChildKey, Manifest] = {}
        saver = HeadSaver(heads, lambda _: None)
        served = ServedDefinitions(connection.cluster)
        self.executor = Executor(
            connection.cluster, saver, self.note, lambda *_: None, served.storable
        )

    def note(self, kind: str, manifest: Manifest) -> None:
        self.children[ChildKey(kind, manifest["metadata"]["name"])] = manifest

    async def reconcile_once(self) -> bool:
        """Reconcile once; return whether to reconcile again at once."""
        seen = observed(
            children=self.children,
            has_secret=has_secret("one", self.children),
            apply_error=self.executor.rejection("one"),
        )
        return await self.executor.execute(seen, reconcile(seen, Settings()))

    @property
    def ready(self) -> Json:
        """The last written Ready condition of the session."""
        conditions = self.api.objects[SESSION]["status"]["conditions"]
        return next(item for item in conditions if item["type"] == "Ready")


@pytest.fixture
async def operator(connection: Connection) -> AsyncIterator[Operator]:
    async with aiohttp.ClientSession() as http:
        yield Operator(connection.api, HeadClient(connection.cluster, http), connection)


def token(api: MemoryApi) -> Any:
    return api.objects[SECRET]["data"]["token"]


async def test_pods_are_created_after_their_configuration_and_policies(operator: Operator) -> None:
    await operator.reconcile_once()

    made = [request.split()[1] for request in operator.api.writes]
    needed = {"one-config", "secrets", "networkpolicies", "poddisruptionbudgets"}
    before = made[: min(made.index(RAY_CLUSTER), made.index(SERVICE))]
    assert needed <= {part for path in before for part in path.split("/")}


async def test_the_finalizer_is_added_before_any_child(
    operator: Operator,
) -> None:
    await operator.reconcile_once()

    writes = operator.api.writes
    assert writes.index(f"PATCH {SESSION}") < writes.index(f"PATCH {RAY_CLUSTER}")
    assert operator.api.objects[SESSION]["metadata"]["finalizers"] == [labels.FINALIZER]


async def test_no_pod_is_created_while_one_of_its_support_objects_is_rejected(
    operator: Operator,
) -> None:
    operator.api.refused["one-config"] = 422

    await operator.reconcile_once()

    assert RAY_CLUSTER not in operator.api.objects


async def test_a_rejected_write_is_reported_and_retried(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422

    assert await operator.reconcile_once(), "the status is to say it"
    with pytest.raises(Rejected, match="refused by the test"):
        await operator.reconcile_once()

    assert operator.ready["reason"] == "ApplyFailed"
    assert "one-config" in operator.ready["message"]


async def test_a_rejection_with_changing_messages_is_retried_with_backoff(
    operator: Operator,
) -> None:
    operator.api.refused["one-config"] = 422
    await operator.reconcile_once()

    operator.api.explanation = "refused, request 1"
    with pytest.raises(Rejected, match="request 1"):
        await operator.reconcile_once()
    operator.api.explanation = "refused, request 2"
    with pytest.raises(Rejected, match="request 2"):
        await operator.reconcile_once()

    assert operator.ready["reason"] == "ApplyFailed"
    assert "request 1" in operator.ready["message"], "what was known when it was looked at"


async def test_a_resolved_rejection_disappears_from_the_status(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422
    await operator.reconcile_once()

    operator.api.refused.clear()
    assert await operator.reconcile_once(), "the status is to say it"
    await operator.reconcile_once()

    assert operator.ready["reason"] != "ApplyFailed"
    assert RAY_CLUSTER in operator.api.objects


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_a_failing_api_server_is_not_a_rejection(operator: Operator, status: int) -> None:
    operator.api.refused["one-config"] = status

    with pytest.raises(Unavailable):
        await operator.reconcile_once()

    assert operator.executor.rejection("one") is None


async def test_a_rejected_event_does_not_block(operator: Operator) -> None:
    operator.api.refused["events"] = 403

    await operator.reconcile_once()

    assert RAY_CLUSTER in operator.api.objects
    assert operator.ready["status"] == "False"


async def test_a_secret_of_a_deleted_session_is_neither_used_nor_adopted(
    operator: Operator,
) -> None:
    operator.api.put(SECRET, {"data": {"token": "old"}}, ownerReferences=ANOTHER_OWNER)

    await operator.reconcile_once()
    with pytest.raises(Rejected, match="Secret one-token does not belong to this session"):
        await operator.reconcile_once()

    assert token(operator.api) == "old"
    assert {MARKER, RAY_CLUSTER}.isdisjoint(operator.api.objects)


async def test_a_deleted_secret_is_recreated(operator: Operator) -> None:
    await operator.reconcile_once()
    before = token(operator.api)

    del operator.api.objects[SECRET]
    # The garbage collector removes the Secret from the owners of its marker.
    owners = operator.api.objects[MARKER]["metadata"]["ownerReferences"]
    left = [owner for owner in owners if owner["kind"] != "Secret"]
    operator.note("ConfigMap", operator.api.put(MARKER, {}, ownerReferences=left))
    await operator.reconcile_once()

    assert token(operator.api) != before
    assert has_secret("one", operator.children)


async def test_a_deleted_marker_is_recreated_for_the_same_secret(operator: Operator) -> None:
    await operator.reconcile_once()
    before = token(operator.api)

    del operator.api.objects[MARKER]
    del operator.children[ChildKey("ConfigMap", "one-token")]
    await operator.reconcile_once()

    assert token(operator.api) == before
    assert has_secret("one", operator.children)


async def finalize(operator: Operator) -> bool:
    """Reconcile the session, which is deleted and has no head."""
    deleted = observed(deleted=NOON, has_finalizer=True)
    return await operator.executor.execute(deleted, reconcile(deleted, Settings()))


async def test_the_finalizer_is_removed_regardless_of_its_field_manager(
    operator: Operator,
) -> None:
    held = ["example.org/backup", labels.FINALIZER]
    operator.api.put(SESSION, {}, uid="uid-of-one", finalizers=held)

    assert not await finalize(operator)

    assert operator.api.objects[SESSION]["metadata"]["finalizers"] == ["example.org/backup"]


async def test_removing_the_finalizer_of_a_session_that_is_gone_succeeds(
    operator: Operator,
) -> None:
    assert not await finalize(operator)

    operator.api.put(SESSION, {}, uid="uid-of-another", finalizers=[labels.FINALIZER])
    assert not await finalize(operator)

    assert operator.api.writes == []


async def test_a_conflict_while_removing_the_finalizer_is_retried(
    operator: Operator,
) -> None:
    operator.api.put(SESSION, {}, uid="uid-of-one", finalizers=[labels.FINALIZER])
    operator.api.refused["one"] = 409

    with pytest.raises(Conflict):
        await finalize(operator)


@pytest.mark.parametrize(
    ("path", "plan"),
    [
        (RAY_CLUSTER, Plan((Delete(ChildKey("RayCluster", "one")),))),
        (SESSION, Plan((DeleteSession(),))),
    ],
    ids=["RayCluster", "TrainingSession"],
)
async def test_a_recreated_object_is_not_deleted(operator: Operator, path: str, plan: Plan) -> None:
    seen = {ChildKey("RayCluster", "one"): {"metadata": {"name": "one", "uid": "uid-seen"}}}
    operator.api.put(path, {}, uid="uid-of-another")

    with pytest.raises(Conflict):
        await operator.executor.execute(observed(children=seen), plan)

    assert path in operator.api.objects


async def test_no_pods_are_created_for_a_session_that_is_gone(operator: Operator) -> None:
    operator.api.refused["one"] = 409

    with pytest.raises(Conflict):
        await operator.reconcile_once()

    assert {RAY_CLUSTER, SERVICE}.isdisjoint(operator.api.objects)


async def test_a_rejection_posts_an_event(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422

    await operator.reconcile_once()
    with pytest.raises(Rejected):
        await operator.reconcile_once()

    events = [item for item in operator.api.objects.values() if "involvedObject" in item]
    assert "ApplyFailed" in {event["reason"] for event in events}


async def test_a_restart_of_a_head_is_counted_when_the_status_is_written(
    operator: Operator,
) -> None:
    before = metric_value(metrics.RESTARTS)
    head = a_pod("head", restarts=1)
    seen = observed(pods=(head,), status=a_status(incarnation="uid-of-head-0"))

    await operator.executor.execute(seen, reconcile(seen, Settings()))

    assert operator.api.objects[SESSION]["status"]["restarts"] == 1
    assert metric_value(metrics.RESTARTS) == before + 1
