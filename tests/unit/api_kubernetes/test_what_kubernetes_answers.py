"""The API server's handling of Kubernetes responses, over a real connection."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from tinkercloud_api.providers.cluster_api import (
    ClusterApi,
    ClusterRefused,
    ClusterUnreachable,
    Event,
    Listing,
    ResourceVersionGone,
)
from tinkercloud_api.providers.session_cache import Cache
from tinkercloud_api.providers.session_status import TrainingSessionView, read_session
from tinkercloud_testing.cluster.memory_api import Connection, a_memory_api
from tinkercloud_testing.sessions import Json, a_session_manifest

SESSIONS = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions"


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with a_memory_api() as made:
        yield made


@pytest.fixture
def cluster(connection: Connection) -> ClusterApi:
    return ClusterApi(connection.client, "default")


def a_session(connection: Connection, name: str, **spec: Any) -> Json:
    manifest = a_session_manifest(name, **spec)
    return connection.api.put(f"{SESSIONS}/{name}", manifest, generation=1)


async def test_creating_an_existing_object_succeeds(
    connection: Connection, cluster: ClusterApi
) -> None:
    a_session(connection, "one")

    await cluster.create("trainingsessions", a_session_manifest("one"))


async def test_another_conflict_is_not_taken_for_an_existing_object(
    connection: Connection, cluster: ClusterApi
) -> None:
    connection.api.refused["trainingsessions"] = 409
    connection.api.explanation = "Operation cannot be fulfilled on resourcequotas"

    with pytest.raises(ClusterUnreachable, match="resourcequotas"):
        await cluster.create("trainingsessions", a_session_manifest("one"))


@pytest.mark.parametrize(
    ("explanation", "remedy"),
    [
        ('User "api" cannot create resource "trainingsessions"', "give the API server's service"),
        ("exceeded quota: q, requested: count/trainingsessions=1", "finish other sessions"),
        ("unable to create new content in namespace a because it is being terminated", None),
        ("admission webhook denied the request: label it", None),
    ],
)
async def test_an_error_contains_advice_unless_kubernetes_gives_it(
    connection: Connection, cluster: ClusterApi, explanation: str, remedy: str | None
) -> None:
    connection.api.refused["trainingsessions"] = 403
    connection.api.explanation = explanation

    with pytest.raises(ClusterRefused) as refused:
        await cluster.create("trainingsessions", a_session_manifest("one"))

    before, _, after = refused.value.message.partition(explanation)
    assert "403" in before
    assert after.startswith(f"; {remedy}") if remedy is not None else after == ""


class WithoutPast(ClusterApi):
    """A cluster in which starting a watch always fails, even right after a list."""

    lists = 0

    async def list_all(self, plural: str) -> Listing:
        self.lists += 1
        return await super().list_all(plural)

    async def watch(
        self, plural: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[Event, None]:
        raise ResourceVersionGone(f"{plural}: too old resource version: {resource_version}")
        yield


async def test_a_failing_watch_is_retried_with_a_pause(
    connection: Connection,
) -> None:
    cluster = WithoutPast(connection.client, "default")
    cache: Cache[TrainingSessionView] = Cache(
        cluster, "trainingsessions", read_session, lambda _: None
    )

    keeping = asyncio.create_task(cache.run())
    await asyncio.sleep(0.5)
    keeping.cancel()

    assert 1 <= cluster.lists <= 3


async def test_an_unreadable_object_does_not_hide_others(
    connection: Connection, cluster: ClusterApi
) -> None:
    a_session(connection, "of-a-later-version", role="Evaluator")
    a_session(connection, "readable")
    cache: Cache[TrainingSessionView] = Cache(
        cluster, "trainingsessions", read_session, lambda _: None
    )

    keeping = asyncio.create_task(cache.run())
    async with asyncio.timeout(10):
        await cache.is_filled.wait()
    keeping.cancel()

    assert cache.get("readable") is not None
    assert cache.get("of-a-later-version") is None
