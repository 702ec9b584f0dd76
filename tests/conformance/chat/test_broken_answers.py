"""Answers that break off end with an error that the official clients name."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def test_clients_with_more_retries_wait_for_a_server_that_restarts(
    chat_server: Server, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    short = {"model": CHAT_MODEL, "max_tokens": 1, "messages": MESSAGES}
    chat_server.kill()
    with ThreadPoolExecutor() as callers:
        creates: list[Callable[..., Any]] = [
            openai_client.with_options(max_retries=10).chat.completions.create,
            anthropic_client.with_options(max_retries=10).messages.create,
        ]
        calls = [callers.submit(create, **short) for create in creates]
        chat_server.start()
        answers = [call.result() for call in calls]

    assert [answer.model for answer in answers] == [CHAT_MODEL, CHAT_MODEL]


def test_a_stream_of_anthropic_ends_with_an_error_when_its_head_dies(
    chat_server: Server, anthropic_client: anthropic.Anthropic
) -> None:
    stream = anthropic_client.messages.create(messages=MESSAGES, stream=True, **LONG)  # type: ignore[call-overload]
    next(stream)
    chat_server.kill_heads()

    with pytest.raises(anthropic.APIStatusError, match=WHY):
        list(stream)
