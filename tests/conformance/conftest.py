"""One started server with a tiny model, shared by the conformance tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.servers import Server, a_server

MODEL = "tiny/llama"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model that is served."""
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server for all tests of the session."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[tinker.ServiceClient]:
    """Return a client with a session of its own, finished afterwards."""
    with server.client() as service_client:
        yield service_client
