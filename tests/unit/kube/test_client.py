"""The Kubernetes client: what it sends, and the error that each answer becomes."""

from pathlib import Path

import pytest

from tinkercloud_kube.client import Client, ObjectRef, credentials
from tinkercloud_kube.errors import (
    AlreadyExists,
    Conflict,
    Expired,
    KubernetesError,
    NoCredentials,
    NotFound,
    NotLeading,
    Rejected,
    Unavailable,
    error_of,
)
from tinkercloud_testing.cluster.kube_api.memory_api import Connection
from tinkercloud_testing.resources.sessions import a_session_manifest

SESSIONS = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions"
ONE = ObjectRef("TrainingSession", "one")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, Rejected),
        (401, Unavailable),
        (403, Rejected),
        (404, NotFound),
        (409, Conflict),
        (410, Expired),
        (422, Rejected),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
def test_the_status_of_an_answer_decides_which_error_it_becomes(
    status: int, expected: type[KubernetesError]
) -> None:
    error = error_of(status, "GET /api/v1/nodes", b"{}")

    assert type(error) is expected
    assert str(error).startswith(f"GET /api/v1/nodes: {status}")


def test_a_field_that_no_definition_declares_is_rejected_although_the_answer_is_500() -> None:
    content = b'{"kind": "Status", "message": ".spec.x: field not declared in schema"}'

    assert type(error_of(500, "PATCH /x", content)) is Rejected


def test_an_error_quotes_the_start_of_a_status_object_and_keeps_all_of_its_message() -> None:
    content = b'{"kind": "Status", "message": "%s"}' % (b"long" * 1000)

    error = error_of(403, "GET /x", content)

    assert len(str(error)) < 600
    assert error.message == "long" * 1000


@pytest.mark.parametrize(
    "content", [b"<html>secret</html>", b'{"password": "secret"}', b'["secret"]']
)
def test_an_error_quotes_nothing_but_status_objects(content: bytes) -> None:
    assert "secret" not in str(error_of(502, "GET /x", content))


async def test_creating_an_object_that_exists_is_an_error_of_its_own(
    connection: Connection, client: Client
) -> None:
    connection.api.put(f"{SESSIONS}/one", a_session_manifest("one"))

    with pytest.raises(AlreadyExists):
        await client.create(a_session_manifest("one"))


async def test_a_conflict_over_another_object_does_not_mean_that_the_object_exists(
    connection: Connection, client: Client
) -> None:
    connection.api.refused["trainingsessions"] = 409
    connection.api.explanation = "Operation cannot be fulfilled on resourcequotas"

    with pytest.raises(Conflict, match="resourcequotas") as caught:
        await client.create(a_session_manifest("one"))

    assert not isinstance(caught.value, AlreadyExists)


async def test_a_missing_object_is_not_found_or_none(client: Client) -> None:
    ref = ObjectRef("ResourceClaimTemplate", "missing")

    with pytest.raises(NotFound):
        await client.get(ref)
    assert await client.find(ref) is None
    assert await client.secret("missing") == {}


async def test_the_entries_of_a_secret_are_decoded(connection: Connection, client: Client) -> None:
    path = "/api/v1/namespaces/default/secrets/one-token"
    connection.api.put(path, {"data": {"token": "YWJj"}})

    assert await client.secret("one-token") == {"token": b"abc"}


async def test_a_deletion_does_not_affect_a_newer_object_of_the_same_name(
    connection: Connection, client: Client
) -> None:
    stored = connection.api.put(f"{SESSIONS}/one", a_session_manifest("one"))

    with pytest.raises(Conflict):
        await client.delete(ONE, "uid of an earlier one")
    assert f"{SESSIONS}/one" in connection.api.objects

    await client.delete(ONE, stored["metadata"]["uid"])
    assert f"{SESSIONS}/one" not in connection.api.objects


async def test_a_list_reports_the_resource_version_of_its_moment(
    connection: Connection, client: Client
) -> None:
    stored = connection.api.put(f"{SESSIONS}/one", a_session_manifest("one"))

    page = await client.list_all("TrainingSession")

    assert [item["metadata"]["name"] for item in page.items] == ["one"]
    assert page.version > int(stored["metadata"]["resourceVersion"])


async def test_a_server_that_does_not_answer_in_time_is_unavailable(
    connection: Connection,
) -> None:
    connection.api.is_silent = True
    client = Client(connection.client, "default", manager="a test", timeout_seconds=0.05)

    with pytest.raises(Unavailable, match="Kubernetes does not answer GET /api/v1/nodes"):
        await client.list_all("Node")


async def test_nothing_is_sent_without_permission_to_act(connection: Connection) -> None:
    client = Client(connection.client, "default", manager="a test", may_send=lambda: False)

    with pytest.raises(NotLeading, match="the Lease is not held"):
        await client.delete(ONE, "its uid")

    assert connection.api.requests == []


async def test_requests_are_counted_by_verb_and_status(connection: Connection) -> None:
    counted: list[tuple[str, str]] = []
    client = Client(
        connection.client,
        "default",
        manager="a test",
        timeout_seconds=0.05,
        count=lambda verb, code: counted.append((verb, code)),
    )

    await client.create(a_session_manifest("one"))
    connection.api.is_silent = True
    with pytest.raises(Unavailable):
        await client.get(ONE)

    assert counted == [("POST", "201"), ("GET", "none")]


async def test_missing_credentials_are_an_error_that_says_where_to_put_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(NoCredentials, match="set KUBECONFIG"):
        await credentials()


async def test_credentials_come_from_kubeconfig_and_ignore_proxies_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: k, cluster: {server: 'https://k.example'}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
        "contexts: [{name: c, context: {cluster: k, user: u}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    configuration = await credentials()

    assert configuration.host == "https://k.example"
    assert configuration.client_session_kwargs == {"trust_env": False}
