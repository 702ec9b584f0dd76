"""Servers whose heads have ranks."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def servers_that_start_fast(warm_servers: None) -> None:
    """Let all servers start in forks of a process that has imported their modules."""
