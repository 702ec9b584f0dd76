"""Plans are carried out stage by stage; what can't be done is said, and tried again."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tinkercloud_crds import labels
from tinkercloud_operator import metrics
from tinkercloud_operator.children.secret_marker import has_secret
from tinkercloud_operator.decide.actions import Delete, DeleteSession, Plan
from tinkercloud_operator.decide.reconcile import reconcile
from tinkercloud_operator.run.cluster import Conflict, Refused, Unreachable
from tinkercloud_operator.run.executor import Executor
from tinkercloud_operator.run.head_client import HeadClient
from tinkercloud_operator.run.save_requests import HeadSaver
from tinkercloud_operator.run.served_definitions import ServedDefinitions
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.snapshot import ChildKey, Manifest
from tinkercloud_testing.cluster.memory_api import Connection, Json, MemoryApi
from tinkercloud_testing.sessions import NOON, a_pod, a_status, observed

SESSION = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions/one"
RAY_CLUSTER = "/apis/ray.io/v1/namespaces/default/rayclusters/one"
SERVICE = "/api/v1/namespaces/default/services/one-head"
SECRET = "/api/v1/namespaces/default/secrets/one-token"
MARKER = "/api/v1/namespaces/default/configmaps/one-token"
OF_ANOTHER = [{"kind": "TrainingSession", "name": "one", "uid": "uid-of-an-earlier-one"}]


class Operator:
    """Looks at one session, and does what is to be done about it."""

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

    async def look(self) -> bool:
        """Look once; return whether it is to look again at once."""
        seen = observed(
            children=self.children,
            has_secret=has_secret("one", self.children),
            apply_error=self.executor.rejection("one"),
        )
        return await self.executor.execute(seen, reconcile(seen, Settings()))

    @property
    def ready(self) -> Json:
        """The session's Ready condition, as it was written last."""
        conditions = self.api.objects[SESSION]["status"]["conditions"]
        return next(item for item in conditions if item["type"] == "Ready")


@pytest.fixture
async def operator(connection: Connection) -> AsyncIterator[Operator]:
    async with aiohttp.ClientSession() as http:
        yield Operator(connection.api, HeadClient(connection.cluster, http), connection)


def token(api: MemoryApi) -> Any:
    return api.objects[SECRET]["data"]["token"]


async def test_pods_are_made_after_all_that_they_are_told_and_bound_by(operator: Operator) -> None:
    await operator.look()

    made = [request.split()[1] for request in operator.api.writes]
    told = {"one-config", "secrets", "networkpolicies", "poddisruptionbudgets"}
    before = made[: min(made.index(RAY_CLUSTER), made.index(SERVICE))]
    assert told <= {part for path in before for part in path.split("/")}


async def test_the_finalizer_is_held_before_there_is_anything_to_be_finalized(
    operator: Operator,
) -> None:
    await operator.look()

    writes = operator.api.writes
    assert writes.index(f"PATCH {SESSION}") < writes.index(f"PATCH {RAY_CLUSTER}")
    assert operator.api.objects[SESSION]["metadata"]["finalizers"] == [labels.FINALIZER]


async def test_no_pod_is_made_while_something_it_needs_is_refused(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422

    await operator.look()

    assert RAY_CLUSTER not in operator.api.objects


async def test_what_is_refused_is_said_and_tried_again(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422

    assert await operator.look(), "the status is to say it"
    with pytest.raises(Refused, match="refused by the test"):
        await operator.look()

    assert operator.ready["reason"] == "ApplyFailed"
    assert "one-config" in operator.ready["message"]


async def test_a_refusal_that_is_never_worded_the_same_is_said_and_tried_again_later(
    operator: Operator,
) -> None:
    operator.api.refused["one-config"] = 422
    await operator.look()

    operator.api.explanation = "refused, request 1"
    with pytest.raises(Refused, match="request 1"):
        await operator.look()
    operator.api.explanation = "refused, request 2"
    with pytest.raises(Refused, match="request 2"):
        await operator.look()

    assert operator.ready["reason"] == "ApplyFailed"
    assert "request 1" in operator.ready["message"], "what was known when it was looked at"


async def test_a_refusal_that_is_over_is_not_said_any_longer(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422
    await operator.look()

    operator.api.refused.clear()
    assert await operator.look(), "the status is to say it"
    await operator.look()

    assert operator.ready["reason"] != "ApplyFailed"
    assert RAY_CLUSTER in operator.api.objects


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_an_api_server_in_trouble_is_no_refusal(operator: Operator, status: int) -> None:
    operator.api.refused["one-config"] = status

    with pytest.raises(Unreachable):
        await operator.look()

    assert operator.executor.rejection("one") is None


async def test_an_event_that_is_refused_holds_nothing_up(operator: Operator) -> None:
    operator.api.refused["events"] = 403

    await operator.look()

    assert RAY_CLUSTER in operator.api.objects
    assert operator.ready["status"] == "False"


async def test_a_secret_of_an_earlier_session_is_neither_used_nor_taken(operator: Operator) -> None:
    operator.api.put(SECRET, {"data": {"token": "old"}}, ownerReferences=OF_ANOTHER)

    await operator.look()
    with pytest.raises(Refused, match="Secret one-token does not belong to this session"):
        await operator.look()

    assert token(operator.api) == "old"
    assert {MARKER, RAY_CLUSTER}.isdisjoint(operator.api.objects)


async def test_a_secret_that_went_is_made_again(operator: Operator) -> None:
    await operator.look()
    before = token(operator.api)

    del operator.api.objects[SECRET]
    # What the garbage collector leaves of its witness.
    owners = operator.api.objects[MARKER]["metadata"]["ownerReferences"]
    left = [owner for owner in owners if owner["kind"] != "Secret"]
    operator.note("ConfigMap", operator.api.put(MARKER, {}, ownerReferences=left))
    await operator.look()

    assert token(operator.api) != before
    assert has_secret("one", operator.children)


async def test_a_witness_that_went_is_made_again_of_the_same_secret(operator: Operator) -> None:
    await operator.look()
    before = token(operator.api)

    del operator.api.objects[MARKER]
    del operator.children[ChildKey("ConfigMap", "one-token")]
    await operator.look()

    assert token(operator.api) == before
    assert has_secret("one", operator.children)


async def let_go(operator: Operator) -> bool:
    """Let the operator look at the session, which is deleted and has no head."""
    deleted = observed(deleted=NOON, has_finalizer=True)
    return await operator.executor.execute(deleted, reconcile(deleted, Settings()))


async def test_a_deleted_session_is_let_go_whoever_has_set_its_finalizer(
    operator: Operator,
) -> None:
    held = ["example.org/backup", labels.FINALIZER]
    operator.api.put(SESSION, {}, uid="uid-of-one", finalizers=held)

    assert not await let_go(operator)

    assert operator.api.objects[SESSION]["metadata"]["finalizers"] == ["example.org/backup"]


async def test_a_deleted_session_that_is_gone_already_is_let_go(operator: Operator) -> None:
    assert not await let_go(operator)

    operator.api.put(SESSION, {}, uid="uid-of-another", finalizers=[labels.FINALIZER])
    assert not await let_go(operator)

    assert operator.api.writes == []


async def test_a_session_that_changed_while_it_was_let_go_is_looked_at_again(
    operator: Operator,
) -> None:
    operator.api.put(SESSION, {}, uid="uid-of-one", finalizers=[labels.FINALIZER])
    operator.api.refused["one"] = 409

    with pytest.raises(Conflict):
        await let_go(operator)


@pytest.mark.parametrize(
    ("path", "plan"),
    [
        (RAY_CLUSTER, Plan((Delete(ChildKey("RayCluster", "one")),))),
        (SESSION, Plan((DeleteSession(),))),
    ],
    ids=["RayCluster", "TrainingSession"],
)
async def test_what_was_made_again_is_not_deleted_in_the_place_of_what_was_seen(
    operator: Operator, path: str, plan: Plan
) -> None:
    seen = {ChildKey("RayCluster", "one"): {"metadata": {"name": "one", "uid": "uid-seen"}}}
    operator.api.put(path, {}, uid="uid-of-another")

    with pytest.raises(Conflict):
        await operator.executor.execute(observed(children=seen), plan)

    assert path in operator.api.objects


async def test_no_pods_are_made_of_a_session_that_is_gone(operator: Operator) -> None:
    operator.api.refused["one"] = 409

    with pytest.raises(Conflict):
        await operator.look()

    assert {RAY_CLUSTER, SERVICE}.isdisjoint(operator.api.objects)


async def test_what_is_refused_is_announced(operator: Operator) -> None:
    operator.api.refused["one-config"] = 422

    await operator.look()
    with pytest.raises(Refused):
        await operator.look()

    events = [item for item in operator.api.objects.values() if "involvedObject" in item]
    assert "ApplyFailed" in {event["reason"] for event in events}


async def test_a_restart_of_a_head_is_counted_when_it_is_written(operator: Operator) -> None:
    counted = metrics.RESTARTS._value
    before = counted.get()
    head = a_pod("head", restarts=1)
    seen = observed(pods=(head,), status=a_status(incarnation="uid-of-head-0"))

    await operator.executor.execute(seen, reconcile(seen, Settings()))

    assert operator.api.objects[SESSION]["status"]["restarts"] == 1
    assert counted.get() == before + 1
