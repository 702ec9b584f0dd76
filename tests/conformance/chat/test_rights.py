"""Keys without rights are refused in the shape of each endpoint, and change nothing."""

import json

import anthropic
import openai
import pytest

from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def reader(chat_server: Server) -> str:
    """Return a read-only key of an owner without any sessions."""
    made = chat_server.command(
        *("keys", "create", "reader", "--owner", "reader", "--role", "read-only", "--json")
    )
    return str(json.loads(made)["key"])


def test_the_official_clients_raise_their_own_error_for_a_missing_right(
    chat_server: Server, reader: str
) -> None:
    url = chat_server.url
    with (
        openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=reader, max_retries=0) as one,
        pytest.raises(openai.PermissionDeniedError) as of_openai,
    ):
        one.chat.completions.create(model=CHAT_MODEL, messages=[HELLO])  # type: ignore[list-item]
    with (
        anthropic.Anthropic(base_url=f"{url}/anthropic/api", api_key=reader, max_retries=0) as two,
        pytest.raises(anthropic.PermissionDeniedError) as of_anthropic,
    ):
        two.messages.create(model=CHAT_MODEL, max_tokens=4, messages=[HELLO])  # type: ignore[list-item]

    assert of_openai.value.code == "permission_denied"
    assert "is read-only" in of_openai.value.message
    assert isinstance(of_anthropic.value.body, dict)
    assert of_anthropic.value.body["error"]["type"] == "permission_error"


def test_describing_a_model_creates_no_session(chat_server: Server, reader: str) -> None:
    with openai.OpenAI(base_url=f"{chat_server.url}/oai/api/v1", api_key=reader) as client:
        assert client.models.retrieve(CHAT_MODEL).id == CHAT_MODEL
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("tinker://nobody:train:0/sampler_weights/x")

    assert chat_server.rest(reader).list_sessions().result().sessions == []


def test_recorded_sessions_are_in_the_audit_log(chat_server: Server) -> None:
    key = chat_server.new_key("recording")
    made = chat_server.request("POST", "/oai/sessions", {"model": CHAT_MODEL}, key=key).json()
    chat_server.request("DELETE", f"/oai/sessions/{made['id']}", key=key)

    entries = chat_server.request("GET", "/api/v1/audit", key=key).json()["entries"]

    outcomes = [(entry["event"], entry["event_details"]["status"]) for entry in entries]
    assert outcomes == [("recorded_session_create", 200), ("recorded_session_delete", 200)]
