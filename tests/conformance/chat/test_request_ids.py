"""A request has one name: in its answer, in the log of the server and in that of the head."""

import json
import secrets
from typing import Any

import httpx
import pytest

from tinkercloud_protocol.wire import request_ids, routes
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

FUNCTION = {"name": "f", "parameters": {"uniqueItems": True}, "strict": True}
CHAT = {
    "model": CHAT_MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 2,
    "tools": [{"type": "function", "function": FUNCTION}],
}
"""A chat with a tool that can't be enforced, of which its head writes a line into its log."""


@pytest.fixture(params=["of the client", "of the server"])
def given(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the headers of a request that has a name already, or not."""
    key = {"x-api-key": API_KEY}
    is_named = request.param == "of the client"
    return {**key, request_ids.HEADER: f"mine-{secrets.token_hex(8)}"} if is_named else key


def names_of_heads(server: Server) -> list[str]:
    """Return the names of requests in the lines of the heads' logs."""
    logs = [path.read_text() for path in (server.state_dir / "heads").glob("*/head.log")]
    written = [line for log in logs for line in log.splitlines() if line[:1] == "{"]
    # A line that another library has written may follow on the same line.
    lines = [json.JSONDecoder().raw_decode(line)[0] for line in written]
    return [line[request_ids.LOG_FIELD] for line in lines if request_ids.LOG_FIELD in line]


def test_the_answer_to_a_post_and_the_line_about_it_in_the_log_have_the_same_name(
    chat_server: Server, given: dict[str, str]
) -> None:
    answer = httpx.post(f"{chat_server.url}/api/v1/create_session", headers=given)

    name = answer.headers[request_ids.HEADER]
    assert name == given.get(request_ids.HEADER, name)
    [line] = [each for each in chat_server.log.splitlines() if name in each]
    assert "session created" in line
    assert f"{request_ids.LOG_FIELD}={name}" in line


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_answer_of_a_head_and_the_line_about_it_in_its_log_have_the_same_name(
    chat_server: Server, given: dict[str, str], *, stream: bool
) -> None:
    chat: dict[str, Any] = {**CHAT, "stream": stream}
    url = chat_server.url + routes.OPENAI_CHAT
    answer = httpx.post(url, json=chat, headers=given, timeout=PATIENCE_SECONDS)
    while answer.status_code == 503:
        # The model is being loaded.
        answer = httpx.post(url, json=chat, headers=given, timeout=PATIENCE_SECONDS)

    name = answer.headers[request_ids.HEADER]
    assert (answer.status_code, answer.text.startswith("data: ")) == (200, stream)
    assert name == given.get(request_ids.HEADER, name)
    assert names_of_heads(chat_server).count(name) == 1
