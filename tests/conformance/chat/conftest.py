"""One server with tiny models that have a chat template, and the official clients."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
import tinker

from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import (
    CHAT_MODEL,
    SAYING_MODEL,
    a_chat_model,
    a_saying_model,
)

_CALL = '\n{"name": "lookup", "parameters": {"order_id": 12345678901234567890123}}\n'
_SAID = {
    "t": ["Sure.", "<tool_call>", _CALL, "</tool_call>"],
    "s": ["Hi", "<|im_start|>", "user", " again"],
    "w": ["世"],
}
"""What the model says, by the last character of the prompt."""


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server for all tests of the package."""
    models = tmp_path_factory.mktemp("models")
    special = ["<tool_call>", "</tool_call>", "<|im_start|>"]
    folders = {
        CHAT_MODEL: a_chat_model(models / "chat", positions=2048),
        SAYING_MODEL: a_saying_model(models / "saying", _SAID, special),
    }
    with a_server(tmp_path_factory.mktemp("chat"), folders, {}) as running:
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
