"""Official clients receive what a model says: its calls, its numbers, and no stop strings."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tinker import types

from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import (
    CHANNEL_MODEL,
    SAYING_MODEL,
    SAYING_TEMPLATE,
    a_saying_model,
)
from tinkercloud_testing.small_models.models import byte_tokenizer

ARGUMENTS = '{"order_id": 12345678901234567890123}'
SCHEMA = {"type": "object", "properties": {"order_id": {"type": "integer"}}}
STOP = "<|im_start|>user"
SAID_IN_CHANNELS = {
    "t": [
        *("<|channel|>analysis<|message|>", "A number.", "<|end|><|start|>assistant"),
        *(
            "<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>",
            ARGUMENTS,
        ),
        "<|call|>",
    ],
    "y": ["<|channel|>final<|message|>", "Yes.", "<|return|>"],
}
CHANNEL_TEMPLATE = (
    SAYING_TEMPLATE.replace("<tool_call>", "a call").replace("</tool_call>", "")
    + "{#- <|start|>assistant to=functions.f<|channel|><|message|><|call|><|return|> #}"
)


@pytest.fixture(scope="module", autouse=True)
def loaded(chat_server: Server) -> None:
    """Wait until the model is loaded."""
    wait_until_loaded(chat_server, SAYING_MODEL)


def wait_until_loaded(server: Server, model: str) -> None:
    with server.client() as sdk:
        sampler = sdk.create_sampling_client(base_model=model).result()
        prompt = types.ModelInput.from_ints(byte_tokenizer().encode("w"))
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


@pytest.fixture(scope="module")
def channel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server whose model writes channels."""
    special = ["<|call|>", "<|return|>"]
    folder = a_saying_model(
        tmp_path_factory.mktemp("channels"), SAID_IN_CHANNELS, special, CHANNEL_TEMPLATE
    )
    with a_server(tmp_path_factory.mktemp("chat"), {CHANNEL_MODEL: folder}, {}) as running:
        wait_until_loaded(running, CHANNEL_MODEL)
        yield running


def asking(how: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": how}]
    return {"model": SAYING_MODEL, "messages": messages, "max_tokens": 60, **fields}


def test_openais_client_reads_a_call_with_special_tags_whole_and_streamed(
    openai_client: openai.OpenAI,
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}]
    fields = asking("t", tools=tools, temperature=0)
    whole = openai_client.chat.completions.create(**fields).choices[0]
    with openai_client.chat.completions.stream(**fields) as stream:
        streamed: Any = stream.get_final_completion().choices[0]

    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("lookup", ARGUMENTS)
        assert (choice.message.content, choice.finish_reason) == ("Sure.", "tool_calls")


def test_anthropics_client_reads_a_call_with_special_tags_whole_and_streamed(
    anthropic_client: anthropic.Anthropic,
) -> None:
    tools: Any = [{"name": "lookup", "input_schema": SCHEMA}]
    fields = asking("t", tools=tools, extra_body={"temperature": 0})
    whole: Any = anthropic_client.messages.create(**fields)
    with anthropic_client.messages.stream(**fields) as stream:
        streamed: Any = stream.get_final_message()

    for message in (whole, streamed):
        text, call = message.content
        assert (text.text, message.stop_reason) == ("Sure.", "tool_use")
        assert (call.name, call.input) == ("lookup", {"order_id": 12345678901234567890123})


@pytest.mark.long
def test_openais_client_reads_channels_as_reasoning_and_calls(
    channel_server: Server,
) -> None:
    url = f"{channel_server.url}/oai/api/v1"
    openai_client = openai.OpenAI(base_url=url, api_key=API_KEY, max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}]
    fields = {**asking("t", tools=tools, temperature=0), "model": CHANNEL_MODEL}
    whole = openai_client.chat.completions.create(**fields).choices[0]
    with openai_client.chat.completions.stream(**fields) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    answer = openai_client.chat.completions.create(
        **{**asking("y", temperature=0), "model": CHANNEL_MODEL}
    ).choices[0]

    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("lookup", ARGUMENTS)
        assert choice.message.reasoning_content == "A number."
        assert (choice.message.content or "", choice.finish_reason) == ("", "tool_calls")
    assert (answer.message.content, answer.finish_reason) == ("Yes.", "stop")


def test_anthropics_client_reads_channels_as_thinking_and_calls(channel_server: Server) -> None:
    url = f"{channel_server.url}/anthropic/api"
    anthropic_client = anthropic.Anthropic(base_url=url, api_key=API_KEY, max_retries=0)
    tools: Any = [{"name": "lookup", "input_schema": SCHEMA}]
    fields = asking("t", tools=tools, extra_body={"temperature": 0})
    fields["model"] = CHANNEL_MODEL
    whole: Any = anthropic_client.messages.create(**fields)
    with anthropic_client.messages.stream(**fields) as stream:
        streamed: Any = stream.get_final_message()

    for message in (whole, streamed):
        thought, call = message.content
        assert (thought.thinking, message.stop_reason) == ("A number.", "tool_use")
        assert (call.name, call.input) == ("lookup", {"order_id": 12345678901234567890123})


def test_a_stop_string_with_a_special_token_ends_all_kinds_of_text(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    fields = asking("s", temperature=0, stop=[STOP])
    chat = openai_client.chat.completions.create(n=2, **fields)
    chunks = openai_client.chat.completions.create(stream=True, **fields)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    completion = openai_client.completions.create(
        model=SAYING_MODEL, prompt="s", temperature=0, stop=STOP, max_tokens=60
    )
    message: Any = anthropic_client.messages.create(
        **asking("s", stop_sequences=["x", STOP], extra_body={"temperature": 0})
    )

    assert {(each.message.content, each.finish_reason) for each in chat.choices} == {("Hi", "stop")}
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 6
    assert streamed == completion.choices[0].text == message.content[0].text == "Hi"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", STOP)


def test_a_stop_string_ends_a_recorded_turn_where_it_ends_its_text(chat_server: Server) -> None:
    sessions, headers = f"{chat_server.url}/oai/sessions", {"X-API-Key": API_KEY}
    created = httpx.post(sessions, json={"model": SAYING_MODEL}, headers=headers).json()
    url = f"{sessions}/{created['id']}"
    fields = asking("s", temperature=0, stop=[STOP])

    answer = httpx.post(f"{url}/v1/chat/completions", json=fields, headers=headers).json()
    [datum] = httpx.get(f"{url}/datums", headers=headers).json()["data"]

    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert sum(datum["loss_fn_inputs"]["mask"]["data"]) == answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("started", [1, 2])
def test_a_completion_begins_with_the_character_that_its_prompt_begins(
    openai_client: openai.OpenAI, started: int
) -> None:
    prompt: Any = byte_tokenizer().encode("w世")[: 1 + started]
    fields: Any = {"model": SAYING_MODEL, "prompt": prompt, "temperature": 0}

    whole = openai_client.completions.create(**fields)
    chunks = openai_client.completions.create(stream=True, **fields)

    assert whole.choices[0].text == "".join(each.choices[0].text for each in chunks) == "世"


def test_a_number_of_a_schema_may_have_any_size(chat_server: Server) -> None:
    schema = '{"type": "object", "minimum": -1e400, "maximum": 123456789012345678901234}'
    body = (
        f'{{"model": "{SAYING_MODEL}", "max_tokens": 60, "temperature": 0, "messages": [{{"role":'
        ' "user", "content": "t"}], "tools": [{"type": "function", "function": {"name": "lookup",'
        f' "parameters": {schema}}}}}]}}'
    )
    url = f"{chat_server.url}/oai/api/v1/chat/completions"
    answer = httpx.post(url, content=body, headers={"X-API-Key": API_KEY})

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
