"""The official anthropic package talks to a served model."""

from typing import Any

import anthropic
import httpx
import pytest

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]
FIELDS: Any = {
    "model": CHAT_MODEL,
    "messages": QUESTION,
    "max_tokens": 24,
    # The package of version 2 has no argument for it.
    "extra_body": {"temperature": 0},
}


def test_a_message_streams_the_text_of_the_whole_message(
    anthropic_client: anthropic.Anthropic,
) -> None:
    whole: Any = anthropic_client.messages.create(**FIELDS)
    with anthropic_client.messages.stream(**FIELDS) as stream:
        streamed = "".join(stream.text_stream)
        final: Any = stream.get_final_message()

    assert [block.type for block in whole.content] == ["text"]
    assert streamed == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24


def test_a_stop_sequence_ends_a_message(anthropic_client: anthropic.Anthropic) -> None:
    text = anthropic_client.messages.create(**FIELDS).content[0].text
    message = anthropic_client.messages.create(**FIELDS, stop_sequences=[text[4:6]])

    assert "".join(block.text for block in message.content) == text.partition(text[4:6])[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[4:6])


def test_tokens_are_counted_as_they_are_billed(anthropic_client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief."}]
    counted = anthropic_client.messages.count_tokens(
        model=CHAT_MODEL, messages=QUESTION, system=system
    )
    usage = anthropic_client.messages.create(**FIELDS, system=system).usage

    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == len("system: Be brief.\nuser: What is 2 + 2?\nassistant: ")


def test_tools_and_their_results_are_part_of_the_conversation(
    anthropic_client: anthropic.Anthropic,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4"}]},
    ]
    tools: Any = [{"name": "add", "input_schema": schema}]
    message = anthropic_client.messages.create(**{**FIELDS, "messages": messages}, tools=tools)

    assert message.usage.input_tokens > len("user: What is 2 + 2?\nassistant: ")


def test_a_request_that_lets_the_model_decide_how_much_to_think_is_answered(
    anthropic_client: anthropic.Anthropic,
) -> None:
    plain = anthropic_client.messages.create(**FIELDS).content[0].text
    adaptive: Any = {"type": "adaptive", "display": "summarized"}
    counted = anthropic_client.messages.count_tokens(
        model=CHAT_MODEL, messages=QUESTION, thinking=adaptive
    )
    with anthropic_client.messages.stream(**FIELDS, thinking=adaptive) as stream:
        message: Any = stream.get_final_message()

    assert message.content[0].text == plain
    assert counted.input_tokens == len("user: What is 2 + 2?\nassistant: ")


def test_an_effort_that_the_template_has_no_place_for_changes_nothing(
    anthropic_client: anthropic.Anthropic,
) -> None:
    plain = anthropic_client.messages.create(**FIELDS)
    message = anthropic_client.messages.create(**FIELDS, output_config={"effort": "high"})

    assert message.usage.input_tokens == plain.usage.input_tokens


def test_errors_have_the_shape_that_the_client_reads(
    anthropic_client: anthropic.Anthropic, chat_server: Server
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        anthropic_client.messages.create(**{**FIELDS, "model": "tiny/unknown"})
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        anthropic_client.messages.create(
            **FIELDS, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    answer = httpx.post(
        f"{chat_server.url}/anthropic/api/v1/messages", content=b"{", headers={"x-api-key": API_KEY}
    )

    assert isinstance(missing.value.body, dict)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
