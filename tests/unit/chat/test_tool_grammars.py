"""Calls that are asked for, in the formats of several families: random texts have their form."""

import json
import random
from typing import Any

import jsonschema
import orjson
import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID
from tinkercloud_testing.small_models.said import a_text
from tinkercloud_testing.small_models.tool_templates import (
    HARMONY,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    QWEN_XML,
    SPECIAL_TOKENS,
    encoded,
)
from tinkercloud_worker.chat.answer_parts import ToolCall
from tinkercloud_worker.chat.conversation import Asked
from tinkercloud_worker.chat.grammar.grammars import Grammars
from tinkercloud_worker.chat.openai_requests import read_chat
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.chat.tool_formats.known import format_of
from tinkercloud_worker.engine.sampling.token_grammar import TokenGrammar

# New grammars are tried in processes of their own.
pytestmark = pytest.mark.timeout(180)
TEMPLATES = {
    "Llama": LLAMA,
    "Mistral with a list": MISTRAL_LIST,
    "Mistral with names": MISTRAL_NAMED,
    "Qwen XML": QWEN_XML,
    "Harmony": HARMONY,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 1},
    },
    "required": ["city", "note"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "boolean"}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"
MODELS = {
    template: a_text(*SPECIAL_TOKENS[template], template=template)
    for template in TEMPLATES.values()
}
GRAMMARS = {template: Grammars() for template in TEMPLATES.values()}
NAMED = {"type": "function", "function": {"name": "look"}}


def a_tool(name: str, schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def asked_of(template: str, **fields: Any) -> tuple[Asked, TokenGrammar, ChatText]:
    text = MODELS[template][0]
    tools = [a_tool("look", SCHEMA, strict=True), a_tool("now", NOTHING)]
    messages = [{"role": "user", "content": "hi"}]
    body = orjson.dumps({"model": "m", "messages": messages, "tools": tools, **fields})
    asked = read_chat(body).ask(text)
    assert asked.rule is not None
    ends = text.turn_ends | {EOS_TOKEN_ID}
    return asked, GRAMMARS[template].compile(asked.rule, text, ends, asked.prompts[0]), text


def accepts(template: str, said: str, **fields: Any) -> bool:
    """Return whether a sample may be this text, and end after it."""
    _, grammar, text = asked_of(template, **fields)
    ends = text.turn_ends | {EOS_TOKEN_ID}
    matcher = grammar.matcher()
    for token in encoded(MODELS[template][1], said):
        if not matcher.allowed(ends)[token]:
            return False
        matcher.add(token)
    return bool(matcher.allowed(ends)[EOS_TOKEN_ID])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_random_texts_are_the_calls_that_are_required(template: str, choice: Any) -> None:
    asked, grammar, text = asked_of(template, tool_choice=choice)
    ends = text.turn_ends | {EOS_TOKEN_ID}
    for seed in range(4):
        draw, matcher = random.Random(seed), grammar.matcher()
        # Reasoning, which may come first, has no end in a random text.
        begin = "<|channel|>commentary" if template == HARMONY else ""
        tokens = encoded(MODELS[template][1], begin)
        for token in tokens:
            matcher.add(token)
        while not matcher.is_complete:
            allowed = [int(each) for each in matcher.allowed(ends).nonzero()[0]]
            tokens.append(draw.choice(allowed))
            matcher.add(tokens[-1])
        said, reader = text.decode(tokens), asked.reader(text)
        assert reader is not None
        parts = [*reader.add(said), *reader.finish()]

        assert parts
        for part in parts:
            assert isinstance(part, ToolCall), said
            assert part.name in ({"look"} if choice == NAMED else {"look", "now"})
            schema = SCHEMA if part.name == "look" else NOTHING
            jsonschema.validate(json.loads(part.arguments_json), schema)


LOOK = '{"city": "Bern", "note": null}'
XML_LOOK = (
    "<tool_call>\n<function=look>\n<parameter=city>\nBern\n</parameter>\n<parameter=note>\n"
    "null\n</parameter>\n</function>\n</tool_call>"
)
CALLS = {
    LLAMA: f'{{"name": "look", "parameters": {LOOK}}}',
    MISTRAL_LIST: f'[TOOL_CALLS] [{{"name": "look", "arguments": {LOOK}}}]',
    MISTRAL_NAMED: f"[TOOL_CALLS]look[ARGS]{LOOK}",
    QWEN_XML: XML_LOOK,
    HARMONY: COMMENTARY.format("look") + LOOK,
}
TWO_CALLS = {
    MISTRAL_LIST: f'[TOOL_CALLS] [{{"name": "look", "arguments": {LOOK}}}, {{"name": "now",'
    ' "arguments": {}}]',
    MISTRAL_NAMED: f"[TOOL_CALLS]look[ARGS]{LOOK}[TOOL_CALLS]now[ARGS]{{}}",
    QWEN_XML: f"{XML_LOOK}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}
"""Templates of Llama and gpt-oss have one call in a turn."""


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_required_calls_have_the_format_and_the_schema(template: str) -> None:
    call = CALLS[template]

    assert accepts(template, call, tool_choice="required")
    assert not accepts(template, f"Well. {call}", tool_choice="required")
    assert not accepts(template, call.replace("Bern", "Rome"), tool_choice="required")
    assert not accepts(template, call.replace("look", "sing"), tool_choice="required")
    assert not accepts(template, "", tool_choice="required")


@pytest.mark.parametrize("template", TWO_CALLS, ids=[name for name in TEMPLATES if " " in name])
def test_parallel_calls_are_allowed_unless_the_request_wants_one(template: str) -> None:
    two = TWO_CALLS[template]

    assert accepts(template, two, tool_choice="required")
    assert not accepts(template, two, tool_choice="required", parallel_tool_calls=False)
    assert not accepts(template, two, parallel_tool_calls=False)
    assert accepts(template, CALLS[template], parallel_tool_calls=False)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_strict_tool_constrains_calls_and_no_other_text(template: str) -> None:
    assert accepts(template, 'Well {"name": [TOOL_CALLS <tool_call')
    assert accepts(template, CALLS[template])
    assert not accepts(template, CALLS[template].replace("Bern", "Rome"))


def test_calls_of_llama_may_have_their_mark() -> None:
    assert accepts(LLAMA, f"<|python_tag|>{CALLS[LLAMA]}", tool_choice="required")


def test_reasoning_in_its_channel_may_come_before_calls_and_json() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOTHING}}

    assert accepts(HARMONY, ANALYSIS + CALLS[HARMONY], tool_choice="required")
    assert accepts(HARMONY, ANALYSIS + FINAL + "{}", response_format=schema)
    assert accepts(HARMONY, CALLS[HARMONY], response_format=schema)
    assert not accepts(HARMONY, "{}", response_format=schema)
    assert not accepts(HARMONY, ANALYSIS + FINAL + "Well.", tool_choice="required")


STRING: dict[str, Any] = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {**STRING, "pattern": "x"}}}, r"\.a: pattern of a string"),
        ({"properties": {"a": {"anyOf": [{**STRING, "format": "date"}]}}}, "format of a string"),
        ({"anyOf": [SCHEMA]}, "anyOf can't be enforced at the top"),
        ({"properties": {"a>b": STRING}}, "no place for the name 'a>b'"),
    ],
)
def test_what_xml_can_not_express_is_refused_by_its_field(
    schema: dict[str, Any], words: str
) -> None:
    tools = [a_tool("f", {"type": "object", **schema})]

    with pytest.raises(InvalidRequest, match=rf"^tools\.0\.function\.parameters.*{words}"):
        asked_of(QWEN_XML, tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    ("template", "name"),
    [(MISTRAL_NAMED, "a b"), (MISTRAL_NAMED, " a"), (MISTRAL_NAMED, "a[ARGS]"), (HARMONY, "a b")],
)
def test_names_that_the_format_can_not_express_are_refused(template: str, name: str) -> None:
    function = Function(name, NOTHING, "tools.0")
    known = format_of(template)
    assert known is not None

    with pytest.raises(InvalidRequest, match=r"^tools\.0.*no place for the name") as refused:
        known.source(AnswerRule(functions=[function]), Reasoning.NONE)

    assert repr(name) in refused.value.message


def test_parameters_that_the_schema_does_not_name_are_free_in_xml() -> None:
    tools = [a_tool("f", {"type": "object"})]
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n2\n</parameter>\n</function>\n</tool_call>"

    assert accepts(QWEN_XML, call, tools=tools, tool_choice="required")
    assert accepts(
        QWEN_XML,
        call.replace("<parameter=x>\n1\n2\n</parameter>\n", ""),
        tools=tools,
        tool_choice="required",
    )
