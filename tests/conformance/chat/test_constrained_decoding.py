"""The official clients ask random models for JSON and for calls, and every answer has the form.

The models are random, so nothing but the grammar makes their answers valid.
"""

import enum
import json
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

QUESTION: Any = [{"role": "user", "content": "Which one?"}]
SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def an_array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TREE = {
    **an_object(value=DIGIT, left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    "$defs": {"leaf": {"anyOf": [{"type": "null"}, an_object(value=DIGIT)]}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": an_object(colour={"enum": ["red", "green", "blue"]}),
    "enum of types": an_object(one={"enum": [1, -2.5, True, None, "x", [1, "y"], {"z": 0}]}),
    "constant": an_object(kind={"const": "point"}, x=DIGIT),
    "nested": an_object(a=an_object(b=an_object(c=an_object(d={"type": "boolean"})))),
    "array": an_object(items=an_array(DIGIT, 2, 4)),
    "array of objects": an_object(items=an_array(an_object(n=DIGIT, s=SHORT), 1, 2)),
    "array of arrays": an_array(an_array({"type": "boolean"}, 2, 2), 2, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [SHORT, DIGIT, {"type": "null"}],
        "items": False,
        "minItems": 3,
    },
    "reference": TREE,
    "any of": {"anyOf": [an_object(a=DIGIT), an_object(b=SHORT), {"type": "null"}]},
    "all of": {"allOf": [an_object(a=DIGIT, b=SHORT), {"required": ["a"]}]},
    "one of": an_object(v={"oneOf": [DIGIT, {"type": "boolean"}]}),
    "optional": {**an_object(a=DIGIT, b=SHORT, c={"type": "boolean"}), "required": ["a"]},
    "nullable": an_object(a={"type": ["integer", "null"], "minimum": -9, "maximum": 9}),
    "names beyond ASCII": an_object(**{"größe": DIGIT, "名前": SHORT, "🙂": {"type": "null"}}),
    "values beyond ASCII": an_object(city={"enum": ["Zürich", "東京", "São Paulo", "🙂🙃"]}),
    "quotes": an_object(**{'a"b\\c\n': {"enum": ['"', "\\", "\n", "</tool_call>"]}}),
    "pattern": an_object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "formats": an_object(
        day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}
    ),
    "bounds": an_object(p={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}),
    "strings": an_object(s={"type": "string", "minLength": 3, "maxLength": 5}),
    "map": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 1},
    "top": {"type": "integer", "minimum": 10, "maximum": 99},
}
WEATHER = an_object(city={"enum": ["Bern", "Oslo"]}, days=DIGIT)
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "ping", "parameters": an_object()}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    wanted = {
        "model": CHAT_MODEL,
        "messages": QUESTION,
        "max_completion_tokens": 400,
        "seed": 3,
    }
    return client.chat.completions.create(**{**wanted, **fields})


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_of_a_random_model_matches_the_schema(
    openai_client: openai.OpenAI, name: str
) -> None:
    schema = SCHEMAS[name]
    answer = ask(openai_client, n=4, response_format=schema_format(schema))

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema, format_checker=checker)


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    name: str = Field(max_length=4)
    colour: Colour


class Whole(BaseModel):
    kind: Literal["whole"]
    parts: list[Part] = Field(min_length=1, max_length=2)
    spare: Part | None


def test_the_openai_package_parses_an_answer_into_a_model_whole_and_streamed(
    openai_client: openai.OpenAI,
) -> None:
    fields: Any = {
        "model": CHAT_MODEL,
        "messages": QUESTION,
        "seed": 4,
        "response_format": Whole,
    }
    whole = openai_client.chat.completions.parse(**fields).choices[0].message
    with openai_client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message

    assert isinstance(whole.parsed, Whole)
    assert streamed.parsed == whole.parsed


def test_a_json_object_is_any_object(openai_client: openai.OpenAI) -> None:
    fields = {"response_format": {"type": "json_object"}, "logit_bias": {"92": 6, "1": 3}}
    answer = ask(openai_client, n=4, **fields)

    texts = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_an_answer_that_reaches_its_length_says_so(openai_client: openai.OpenAI) -> None:
    schema = an_object(s={"type": "string", "minLength": 40})
    choice = ask(openai_client, response_format=schema_format(schema), max_completion_tokens=9)

    assert choice.choices[0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"delimiter|Unterminated|Expecting"):
        json.loads(choice.choices[0].message.content)


def test_streams_and_stop_strings_are_as_without_a_schema(openai_client: openai.OpenAI) -> None:
    fields = {"response_format": schema_format(SCHEMAS["nested"]), "temperature": 0.7}
    whole = ask(openai_client, **fields).choices[0].message.content
    chunks = [chunk.choices[0] for chunk in ask(openai_client, stream=True, **fields)]
    stopped = ask(openai_client, stop=['"c"'], **fields).choices[0]

    assert "".join(each.delta.content or "" for each in chunks) == whole
    assert stopped.message.content == whole[: whole.index('"c"')]
    assert stopped.finish_reason == "stop"


def test_logprobs_are_those_of_the_model_without_the_schema(
    openai_client: openai.OpenAI, chat_server: Server
) -> None:
    """The server scores the same text as a prompt, for which no grammar is asked."""
    fields = {"response_format": schema_format(SCHEMAS["enum"]), "temperature": 0.5}
    choice = ask(openai_client, logprobs=True, top_logprobs=2, **fields).choices[0]
    prompt = "user: Which one?\nassistant: "
    scored = openai_client.completions.create(
        model=CHAT_MODEL,
        prompt=prompt + choice.message.content,
        echo=True,
        logprobs=2,
        max_tokens=0,
    )

    entries = choice.logprobs.content
    assert scored.choices[0].logprobs is not None
    expected = scored.choices[0].logprobs.token_logprobs or []
    found = [entry.logprob for entry in entries]
    assert found == pytest.approx(expected[len(prompt) :], abs=1e-4)
    # What the random model finds likeliest is not what the schema allows.
    likeliest = [entry.top_logprobs[0].token == entry.token for entry in entries]
    assert not all(likeliest)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required"}, {"weather", "ping"}, 99),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "ping"}, 1),
        ({"tool_choice": NAMED}, {"weather"}, 1),
    ],
    ids=["required", "one", "named"],
)
def test_a_random_model_makes_the_calls_that_are_required(
    openai_client: openai.OpenAI,
    fields: dict[str, Any],
    names: set[str],
    most: int,
    *,
    stream: bool,
) -> None:
    # The end of the turn is made likely: a random model would call on and on.
    fields = {"tools": TOOLS, "logit_bias": {"256": 4}, **fields}
    for seed in range(3):
        if stream:
            chunks = [
                each.choices[0] for each in ask(openai_client, stream=True, seed=seed, **fields)
            ]
            calls = [call for each in chunks for call in each.delta.tool_calls or []]
            text = "".join(each.delta.content or "" for each in chunks)
            reason = chunks[-1].finish_reason
        else:
            (choice,) = ask(openai_client, seed=seed, **fields).choices
            calls, text = choice.message.tool_calls, choice.message.content
            reason = choice.finish_reason

        assert reason == "tool_calls"
        assert not text
        assert 1 <= len(calls) <= most
        for call in calls:
            assert call.function.name in names
            schema = WEATHER if call.function.name == "weather" else an_object()
            jsonschema.validate(json.loads(call.function.arguments), schema)


def test_the_openai_package_parses_the_arguments_of_a_strict_tool(
    openai_client: openai.OpenAI,
) -> None:
    tool: Any = openai.pydantic_function_tool(Part, name="part")
    answer = openai_client.chat.completions.parse(
        model=CHAT_MODEL,
        messages=QUESTION,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )

    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Part)


def test_without_a_choice_of_tools_text_stays_text(openai_client: openai.OpenAI) -> None:
    fields = {"tools": TOOLS[1:], "max_completion_tokens": 20}
    plain = ask(openai_client, **fields).choices[0].message
    at_most_one = ask(openai_client, parallel_tool_calls=False, **fields).choices[0].message
    none = ask(openai_client, tool_choice="none", parallel_tool_calls=False, tools=TOOLS)

    assert plain.content
    # Without a grammar, the random model writes bytes that are no characters.
    assert at_most_one.content
    assert not at_most_one.tool_calls
    assert none.choices[0].message.tool_calls is None


def test_the_anthropic_package_gets_the_calls_and_the_json_that_it_asks_for(
    anthropic_client: anthropic.Anthropic,
) -> None:
    tools: Any = [
        {"name": "weather", "input_schema": WEATHER, "strict": True},
        {"name": "ping", "input_schema": an_object()},
    ]
    fields: Any = {
        "model": CHAT_MODEL,
        "messages": QUESTION,
        "max_tokens": 300,
        "tools": tools,
    }
    choices: tuple[Any, ...] = (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    )
    for choice in choices:
        message: Any = anthropic_client.messages.create(**fields, tool_choice=choice)
        with anthropic_client.messages.stream(**fields, tool_choice=choice) as stream:
            streamed: Any = stream.get_final_message()
        for each in (message, streamed):
            (block,) = each.content
            assert each.stop_reason == "tool_use"
            assert block.name == choice.get("name", block.name)
            jsonschema.validate(block.input, WEATHER if block.name == "weather" else an_object())

    none = anthropic_client.messages.create(**fields, tool_choice={"type": "none"})
    assert {block.type for block in none.content} == {"text"}
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMAS["nested"]}}
    message = anthropic_client.messages.create(
        model=CHAT_MODEL, messages=QUESTION, max_tokens=300, output_config=config
    )
    jsonschema.validate(json.loads(message.content[0].text), SCHEMAS["nested"])


def test_a_recorded_session_has_the_exact_tokens_and_the_models_own_logprobs(
    chat_server: Server,
) -> None:
    headers = {"X-API-Key": API_KEY}
    sessions = f"{chat_server.url}/oai/sessions"
    created = httpx.post(sessions, json={"model": CHAT_MODEL}, headers=headers).json()
    base = f"{sessions}/{created['id']}"
    with openai.OpenAI(base_url=f"{base}/v1", api_key=API_KEY, max_retries=0) as client:
        fields = {"response_format": schema_format(SCHEMAS["enum"]), "logprobs": True}
        answer = ask(client, **fields)
    (datum,) = httpx.get(f"{base}/datums", headers=headers).json()["data"]

    inputs = datum["loss_fn_inputs"]
    sampled = [
        (token, logprob)
        for token, logprob, mask in zip(
            *(inputs[name]["data"] for name in ("target_tokens", "logprobs", "mask")), strict=True
        )
        if mask
    ]
    # The end of the turn is sampled too, so that the model can learn it.
    assert len(sampled) == answer.usage.completion_tokens
    entries = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert [logprob for _, logprob in sampled[:-1]] == pytest.approx(entries, abs=1e-6)


HEAVY = {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}, {"multipleOf": 9949}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": schema_format({"not": SHORT})}, "response_format", '"not"'),
        ({"response_format": schema_format({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": schema_format({"$ref": "#/$defs/a"})}, "response_format", "exist"),
        ({"response_format": schema_format({"$ref": "http://a/b"})}, "response_format", "http://a"),
        ({"response_format": schema_format({"const": -(2**63)})}, "response_format", "2\\*\\*53"),
        ({"response_format": schema_format({"enum": []})}, "response_format", "enum is empty"),
        ({"response_format": schema_format(HEAVY)}, "response_format", "too complex"),
        (
            {"response_format": schema_format({"enum": ["x" * (1 << 16)]})},
            "response_format",
            "65536 characters",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "NAME"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice",
            "choose one of weather, ping",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    TOOLS[1],
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"uniqueItems": True}},
                    },
                ],
            },
            "tools.1.function.parameters",
            "uniqueItems",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    openai_client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(openai_client, **fields)

    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == param


def test_strict_tools_that_cannot_be_enforced_are_offered_as_others_are(
    openai_client: openai.OpenAI,
) -> None:
    function = {"name": "f", "parameters": {"uniqueItems": True}, "strict": True}
    tools = [{"type": "function", "function": function}]

    assert ask(openai_client, tools=tools, max_completion_tokens=5).choices[0].message.content
