"""Answers that break off end with an error that the official clients name."""

import anthropic
import openai
import pytest

from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

LONG = {"model": CHAT_MODEL, "max_tokens": 1500}
MESSAGES = [{"role": "user", "content": "Count!"}]
WHY = "the session head stopped in the middle of its answer; send the request again"


def test_a_stream_of_openai_ends_with_an_error_when_its_head_dies(
    chat_server: Server, openai_client: openai.OpenAI
) -> None:
    stream = openai_client.chat.completions.create(messages=MESSAGES, stream=True, **LONG)  # type: ignore[call-overload]
    next(stream)
    chat_server.kill_heads()

    with pytest.raises(openai.APIError, match=WHY):
        list(stream)


def test_a_stream_of_anthropic_ends_with_an_error_when_its_head_dies(
    chat_server: Server, anthropic_client: anthropic.Anthropic
) -> None:
    stream = anthropic_client.messages.create(messages=MESSAGES, stream=True, **LONG)  # type: ignore[call-overload]
    next(stream)
    chat_server.kill_heads()

    with pytest.raises(anthropic.APIStatusError, match=WHY):
        list(stream)
