"""One server with a tiny model that has a chat template, and the official clients."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
import tinker

from tinkercloud_testing.chat import CHAT_MODEL, a_chat_model
from tinkercloud_testing.servers import API_KEY, Server, a_server


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server for all tests of the package."""
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "chat")
    with a_server(tmp_path_factory.mktemp("chat"), {CHAT_MODEL: folder}, {}) as running:
        yield running


@pytest.fixture
def openai_client(chat_server: Server) -> Iterator[openai.OpenAI]:
    """Return the official client of OpenAI, which does not repeat failed requests."""
    url = f"{chat_server.url}/oai/api/v1"
    with openai.OpenAI(base_url=url, api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(chat_server: Server) -> Iterator[anthropic.Anthropic]:
    """Return the official client of Anthropic, which does not repeat failed requests."""
    url = f"{chat_server.url}/anthropic/api"
    with anthropic.Anthropic(base_url=url, api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def sdk(chat_server: Server) -> Iterator[tinker.ServiceClient]:
    """Return a client of the SDK with its own session."""
    with chat_server.client() as client:
        yield client
