"""A model is taught to call a tool; official clients and an agent framework read its calls.

The agent (pydantic-ai) is not changed: it runs in recorded sessions, whose exact prompts become
training data. What the model answers is sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tinker
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tinker import types

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer

QUESTION = "What is 2 + 3?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ANSWER = "Five."
NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
]
SETTINGS: Any = {"temperature": 0, "max_tokens": 80}
TOKENIZER = byte_tokenizer()
Example = tuple[list[int], str]


@dataclass(frozen=True)
class Adder:
    """An agent with a tool, which notes the calls of the tool."""

    url: str
    model: str
    calls: list[tuple[int, int]] = field(default_factory=list)

    def ask(self) -> str:
        """Return its final answer to the question."""
        provider = OpenAIProvider(base_url=self.url, api_key=API_KEY)
        agent = Agent(OpenAIChatModel(self.model, provider=provider), model_settings=SETTINGS)

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Add."""
            self.calls.append((a, b))
            return a + b

        return agent.run_sync(QUESTION).output


class Recording:
    """A recorded session."""

    def __init__(self, server: Server, model: str) -> None:
        """Create the session."""
        sessions, self._headers = f"{server.url}/oai/sessions", {"X-API-Key": API_KEY}
        created = httpx.post(sessions, json={"model": model}, headers=self._headers)
        self._url = f"{sessions}/{created.json()['id']}"
        self.url = f"{self._url}/v1"

    def prompts(self) -> list[list[int]]:
        """Return the exact tokens of the prompt of each turn."""
        recorded = httpx.get(f"{self._url}/datums", headers=self._headers).json()
        return [prompt for each in recorded["data"] for prompt in _prompts(each)]


def _prompts(datum: dict[str, Any]) -> list[list[int]]:
    """Return what comes before each sampled part: a datum may have several turns."""
    inputs = datum["loss_fn_inputs"]
    first: int = datum["model_input"]["chunks"][0]["tokens"][0]
    tokens = [first, *inputs["target_tokens"]["data"]]
    sampled = [0.0, *inputs["mask"]["data"]]
    starts = [at for at in range(1, len(tokens)) if sampled[at] and not sampled[at - 1]]
    return [tokens[:at] for at in starts]


def teach(training: tinker.TrainingClient, examples: Sequence[Example]) -> str:
    """Train until the model knows all answers by heart; return the path of its weights."""
    data = []
    for prompt, text in examples:
        answer = [*TOKENIZER.encode(text), EOS_TOKEN_ID]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        data.append(a_text([*prompt, *answer], weights=weights))
    loss = float("inf")
    for _ in range(40):
        started = [
            (
                training.forward_backward(data, "cross_entropy"),
                training.optim_step(types.AdamParams(learning_rate=1e-2)),
            )
            for _ in range(10)
        ]
        loss = started[-1][0].result().metrics["loss:sum"]
        if loss < 0.1:
            break
    assert loss < 0.1
    return str(training.save_weights_for_sampler(f"after-{len(data)}").result().path)


@pytest.fixture(scope="module")
def taught(chat_server: Server) -> Iterator[str]:
    """Return the path of a model that answers the question with a tool call, then with a number."""
    with chat_server.client() as client:
        training = client.create_lora_training_client(base_model=CHAT_MODEL, rank=32).result()
        path = str(training.save_weights_for_sampler("untaught").result().path)
        direct, first = Recording(chat_server, path), Recording(chat_server, path)
        with openai.OpenAI(base_url=direct.url, api_key=API_KEY, max_retries=0) as plain:
            plain.chat.completions.create(
                model=path, messages=MESSAGES, tools=TOOLS, max_completion_tokens=1
            )
        Adder(first.url, path).ask()
        examples = [(prompt, CALL) for prompt in (*direct.prompts(), first.prompts()[0])]
        path = teach(training, examples)

        # Now it makes the call, so that the agent shows it the result.
        second = Recording(chat_server, path)
        Adder(second.url, path).ask()
        yield teach(training, [*examples, (second.prompts()[1], ANSWER)])


@pytest.mark.long
def test_the_openai_package_reads_a_sampled_call_whole_and_streamed(
    openai_client: openai.OpenAI, taught: str
) -> None:
    fields: Any = {"model": taught, "messages": MESSAGES, "tools": TOOLS, **SETTINGS}
    whole = openai_client.chat.completions.create(**fields).choices[0]
    with openai_client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]

    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
        assert call.id.startswith("call_")


def test_without_tools_the_same_model_is_not_asked_for_a_call(
    openai_client: openai.OpenAI, taught: str
) -> None:
    fields: Any = {"model": taught, "messages": MESSAGES, "tools": TOOLS, **SETTINGS}
    choice = openai_client.chat.completions.create(**fields, tool_choice="none").choices[0]

    assert choice.message.tool_calls is None


def test_the_anthropic_package_reads_a_sampled_call_whole_and_streamed(
    anthropic_client: anthropic.Anthropic, taught: str
) -> None:
    fields: Any = {
        "model": taught,
        "messages": MESSAGES,
        "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
        "max_tokens": 80,
        "extra_body": {"temperature": 0},
    }
    whole: Any = anthropic_client.messages.create(**fields)
    with anthropic_client.messages.stream(**fields) as stream:
        streamed: Any = stream.get_final_message()

    for message in (whole, streamed):
        (block,) = message.content
        assert message.stop_reason == "tool_use"
        assert (block.type, block.name, block.input) == ("tool_use", "add", {"a": 2, "b": 3})


def test_an_agent_framework_calls_its_tool_and_ends(chat_server: Server, taught: str) -> None:
    adder = Adder(f"{chat_server.url}/oai/api/v1", taught)

    assert adder.ask() == ANSWER
    assert adder.calls == [(2, 3)]


def test_an_agent_framework_in_a_recorded_session_becomes_training_data(
    chat_server: Server, taught: str
) -> None:
    recording = Recording(chat_server, taught)
    adder = Adder(recording.url, taught)

    assert adder.ask() == ANSWER
    prompts = [str(TOKENIZER.decode(prompt)) for prompt in recording.prompts()]
    assert len(prompts) == 2
    assert prompts[0].endswith(f"user: {QUESTION}\nassistant: ")
    assert prompts[1].endswith("tool: 5\nassistant: ")
