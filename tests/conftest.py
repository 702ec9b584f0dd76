"""Settings for all tests."""

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Tests run with the settings that they choose, not with those of the developer's shell.
for name in [each for each in os.environ if each.startswith("TINKERCLOUD_")]:
    if not name.startswith("TINKERCLOUD_TEST_"):
        del os.environ[name]

# Tests may be slow on a busy machine.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("reproducible", PATIENT, derandomize=True)
settings.register_profile("search", PATIENT, max_examples=1000)
# A commit is judged by the same examples on every machine; `make test-properties` tries new ones.
settings.load_profile("reproducible")

UNIT_TESTS = Path(__file__).parent / "unit"
UNIT_TEST_SECONDS = 30
"""The timeout of a unit test, including its fixtures; `pytest.mark.timeout` sets a longer one."""


LONG = "TINKERCLOUD_TEST_LONG"
_SERVERS = "browser chaos cluster/kubernetes_provider conformance engines/sdk fuzz"
WITH_SERVERS = [Path(__file__).parent / folder for folder in _SERVERS.split()]
"""Folders of tests that start many servers."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-rerunfailures send small messages at once.

    Its workers send two for each test, and TCP would hold the second one back for 40 ms.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give unit tests a shorter timeout than other tests, and leave out long ones."""
    for item in items:
        if LONG not in os.environ and item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip("takes long: make test-long"))
        if UNIT_TESTS in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TEST_SECONDS))


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    """Commands that tests call in this process configure structlog, mostly to log errors only."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_sessionstart() -> None:
    """Disable garbage collection while tests import torch and other large modules."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection for objects of tests, but not for imported modules."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def servers_that_start_fast(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Start servers and heads in forks of a process that has imported their modules.

    A run without tests of servers needs none.
    """
    paths = {item.path for item in request.session.items}
    if not any(path.is_relative_to(folder) for path in paths for folder in WITH_SERVERS):
        yield
        return
    from tinkercloud_testing.serving import servers  # noqa: PLC0415 - not for unit tests

    with servers.warm_servers(tmp_path_factory.mktemp("warm")):
        yield
