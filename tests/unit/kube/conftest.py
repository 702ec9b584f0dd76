"""A Kubernetes API server that keeps objects in memory, and a client of it."""

from collections.abc import AsyncIterator

import pytest

from tinkercloud_kube.client import Client
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, a_memory_api


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with a_memory_api() as made:
        yield made


@pytest.fixture
def client(connection: Connection) -> Client:
    return Client(connection.client, "default", manager="a test")
