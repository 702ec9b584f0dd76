"""One started server with a tiny model, shared by the conformance tests.

`--trainer NAME` runs what a trainer has to do with on a server whose heads have that trainer; it
may be given several times. Without it heads train in their own process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.servers import TRAINERS, Server, a_server

MODEL = "tiny/llama"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trainer", action="append", choices=list(TRAINERS), help="of the heads")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with every trainer that was asked for."""
    if "trainer" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("trainer") or ["torch"]
        metafunc.parametrize("trainer", wanted, scope="session")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model that is served."""
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, trainer: str
) -> Iterator[Server]:
    """Run a server for all tests of the session."""
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: model_folder}, TRAINERS[trainer]) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[tinker.ServiceClient]:
    """Return a client with a session of its own, finished afterwards."""
    with server.client() as service_client:
        yield service_client
