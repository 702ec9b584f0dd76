"""An in-memory API server, and the operator's connection to it."""

from collections.abc import AsyncIterator

import pytest

from tinkercloud_testing.cluster.kube_api.memory_api import Connection, a_memory_api


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with a_memory_api() as made:
        yield made
