"""One running server with a tiny model, shared by the conformance tests.

`--trainer NAME` runs the tests that depend on the trainer with heads that use that trainer; the
option may be repeated. By default, heads train in their own process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

MODEL = "tiny/llama"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trainer",
        action="append",
        choices=list(TRAINERS),
        help="trainer of the heads; may be repeated",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with every trainer that `--trainer` selects."""
    if "trainer" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("trainer") or ["torch"]
        metafunc.parametrize("trainer", wanted, scope="session")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model to serve."""
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, trainer: str
) -> Iterator[Server]:
    """Run one server for all tests of the session."""
    state_dir = tmp_path_factory.mktemp("state")
    # Tests name other addresses of clients as a proxy does.
    proxies = {"TINKERCLOUD_TRUSTED_PROXIES": '["127.0.0.1"]'}
    with a_server(state_dir, {MODEL: model_folder}, {**TRAINERS[trainer], **proxies}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[tinker.ServiceClient]:
    """Return a client with its own session, which ends with the test."""
    with server.client() as service_client:
        yield service_client
