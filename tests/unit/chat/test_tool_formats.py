"""Calls in the formats of several families: found by the template, and read as the model wrote."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID
from tinkercloud_testing.small_models.said import (
    HERMES_TEMPLATE,
    a_text,
    anthropic_says,
    openai_says,
)
from tinkercloud_testing.small_models.tool_templates import (
    HARMONY,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    QWEN_XML,
    SPECIAL_TOKENS,
    encoded,
)
from tinkercloud_worker.chat.answer_parts import Part, ToolCall
from tinkercloud_worker.chat.openai_requests import read_chat
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.chat.tool_formats.known import format_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "wet": {"type": ["boolean", "null"]},
        "parts": {"$ref": "#/$defs/parts"},
        "any": {},
    },
    "$defs": {"parts": {"type": "array", "items": {"type": "object"}}},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FUNCTIONS = [Function("look", SCHEMA, "tools.0")]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
FINAL_ONLY = FINAL.removeprefix("<|start|>assistant")
COMMENTARY = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


EXAMPLE = (Path(__file__).parents[3] / "examples" / "hermes_tools.jinja").read_text()


def model_of(template: str) -> tuple[ChatText, Any]:
    return a_text(*SPECIAL_TOKENS[template], template=template)


def ended(tokenizer: Any, said: str) -> list[int]:
    return [*encoded(tokenizer, said), EOS_TOKEN_ID]


def in_xml(name: str, **parameters: str) -> str:
    written = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(written)}</function>\n</tool_call>"


EXACT = '{"city": "\\u00e9 [TOOL_CALLS]{\\"",  "days":12345678901234567890123, "a": 1e400}'
CALLS = [
    (LLAMA, f'{{"name": "look", "parameters": {EXACT}}}', "", [("look", EXACT)]),
    (LLAMA, f'\n<|python_tag|>{{"name": "look", "parameters": {EXACT}}}', "", [("look", EXACT)]),
    (LLAMA, '{"type": "function", "name": "look", "parameters": {}}', "", [("look", "{}")]),
    (LLAMA, '<|python_tag|>{"name": "a", "parameters": {}, "b": 1}', "", [("a", "{}")]),
    (
        LLAMA,
        'So: <|python_tag|>{"type": "function", "name": "a", "arguments": "{}"}; {"name": "b",'
        ' "parameters": {"x": ";"}}\n',
        "So:",
        [("a", "{}"), ("b", '{"x": ";"}')],
    ),
    (
        MISTRAL_LIST,
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {EXACT}}}]',
        "",
        [("look", EXACT)],
    ),
    (
        MISTRAL_LIST,
        'So. [TOOL_CALLS][{"name": "a", "arguments": {"x": "]"}}, {"arguments": {}, "name": "b"}]',
        "So.",
        [("a", '{"x": "]"}'), ("b", "{}")],
    ),
    (MISTRAL_NAMED, f"[TOOL_CALLS]look[ARGS]{EXACT}", "", [("look", EXACT)]),
    (
        MISTRAL_NAMED,
        'So.[TOOL_CALLS]a[CALL_ID]abcDEF123[ARGS]{"x": "}"}[TOOL_CALLS]b{}',
        "So.",
        [("a", '{"x": "}"}'), ("b", "{}")],
    ),
    (QWEN_XML, "So.\n\n" + in_xml("look", city="Bern"), "So.", [("look", '{"city": "Bern"}')]),
    (QWEN_XML, f"{in_xml('now')}\n{in_xml('f', x='1')}", "", [("now", "{}"), ("f", '{"x": "1"}')]),
    (QWEN_XML, "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    (QWEN_XML, in_xml("f").removesuffix("</tool_call>"), "", [("f", "{}")]),
    (HARMONY, COMMENTARY + EXACT + "<|call|>", "", [("look", EXACT)]),
    (
        HARMONY,
        f" to=functions.look<|channel|>commentary json<|message|>{EXACT}",
        "",
        [("look", EXACT)],
    ),
    (
        HARMONY,
        f"<|channel|>commentary<|message|>So.<|end|><|start|>assistant{COMMENTARY}{{}}<|call|>",
        "So.",
        [("look", "{}")],
    ),
]
OPENED = "I use <tool_call> tags.\n"
CALLS += [
    (
        QWEN_XML,
        OPENED + in_xml("f", x="<tool_call>"),
        OPENED.rstrip(),
        [("f", '{"x": "<tool_call>"}')],
    ),
    (
        MISTRAL_LIST,
        'I use [TOOL_CALLS] now: [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        "I use [TOOL_CALLS] now:",
        [("f", '{"a": 1}')],
    ),
    (
        MISTRAL_NAMED,
        'I use [TOOL_CALLS] now: [TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}',
        "I use [TOOL_CALLS] now:",
        [("f", '{"a": "[TOOL_CALLS]"}')],
    ),
]
"""Calls after marks that are mentioned."""
IDS = [f"{number}-{case[1][:24]}" for number, case in enumerate(CALLS)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("template", "said", "shown", "calls"), CALLS, ids=IDS)
def test_calls_of_each_family_are_what_the_model_wrote(
    template: str, said: str, shown: str, calls: list[tuple[str, str]], streams: bool
) -> None:
    text, tokenizer = model_of(template)
    tokens = ended(tokenizer, said)

    [choice] = openai_says(text, tokens, streams=streams, tools=[TOOL])
    offered = [{"name": "look", "input_schema": {"type": "object"}}]
    message = anthropic_says(text, tokens, streams=streams, tools=offered)

    assert choice.calls == message.calls == calls
    assert choice.text == message.text == shown
    assert (choice.reason, message.reason) == ("tool_calls", "tool_use")


TEXTS = [
    (LLAMA, '{"name": "look"}'),
    (LLAMA, '{"name": "look", "parameters": {}} Done.'),
    (LLAMA, 'So {"name": "look", "parameters": {}}'),
    (LLAMA, '{"name": "look", "parameters": null}'),
    (LLAMA, '{"name": "look", "parameters": {"a": 1}, "arguments": {}}'),
    (LLAMA, '{"name": "look", "parameters": {"city": "Be'),
    (LLAMA, '<|python_tag|>brave_search.call(query="Bern")'),
    (LLAMA, '{"name": "Ada", "parameters": {"a": 1}}'),
    (LLAMA, '{"name": "look", "parameters": {}, "email": "ada@example.org"}'),
    (LLAMA, '{"type": "tool", "name": "look", "parameters": {}}'),
    (LLAMA, '{"name": "look", "parameters": {}}; {"name": "Ada", "parameters": {}}'),
    (LLAMA, "[1, 2] <|python_ta \n"),
    (MISTRAL_LIST, "[TOOL_CALLS] look"),
    (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "look", "arguments": 5}] so'),
    (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "look", "arguments": {}}, 5]'),
    (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "look", "arguments": {}}'),
    (MISTRAL_NAMED, "[TOOL_CALLS]look"),
    (MISTRAL_NAMED, "[TOOL_CALLS]look[ARGS][1]"),
    (MISTRAL_NAMED, '[TOOL_CALLS]look it[ARGS]{"a": 1}'),
    (MISTRAL_NAMED, '[TOOL_CALLS]look[ARGS]{"a": 1'),
    (MISTRAL_NAMED, '[TOOL_CALLS]look[ARGS]{"a": NaN} [TOOL'),
    (QWEN_XML, '<tool_call>{"name": "look", "arguments": {}}</tool_call>'),
    (QWEN_XML, in_xml("look", city="Bern").replace("</parameter>", "")),
    (QWEN_XML, in_xml("look", city="Bern").replace("</function>", "")),
    (QWEN_XML, in_xml("look", city="Bern").replace("</function>", "Well.</function>")),
    (QWEN_XML, in_xml("look", city="B</parameter>\n<parameter=city>C")),
    (QWEN_XML, "<tool_call>\n<function=look>\n<parameter=city>\nBern"),
    (QWEN_XML, "<function=look></function> </tool_call>"),
    (HARMONY, f"{COMMENTARY}[1]<|call|>"),
    (HARMONY, f'{COMMENTARY}{{"city": "Be'),
    (HARMONY, f"{COMMENTARY}<|call|>"),
    (HARMONY, "<|channel|>commentary to=python code<|message|>{}<|end|>"),
    (HARMONY, "<|start|>user<|message|>Hi"),
    (HARMONY, "<|channel|>commentary to=functions.look"),
    (HARMONY, " to be <|"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("template", "said"), TEXTS)
def test_what_is_no_whole_call_of_the_family_stays_text(
    template: str, said: str, streams: bool
) -> None:
    # Marks are no special tokens here, so that those which end a turn are part of the text.
    text, tokenizer = a_text(template=template)

    [choice] = openai_says(text, ended(tokenizer, said), streams=streams, tools=[TOOL])

    assert (choice.text, choice.calls, choice.reason) == (said, [], "stop")


def parts_of(template: str, pieces: list[str]) -> list[Part]:
    known = format_of(template)
    assert known is not None
    reader = known.reader(FUNCTIONS)
    assert reader is not None
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    joined: list[Part] = []
    for is_call, group in groupby(parts, lambda part: isinstance(part, ToolCall) or type(part)):
        if is_call is True:
            joined += [replace(part, id="id") for part in group if isinstance(part, ToolCall)]
        else:
            texts = [part for part in group if isinstance(part, str)]
            joined.append(type(texts[0])("".join(texts)))
    return joined


@given(st.sampled_from([case[:2] for case in CALLS] + TEXTS), st.lists(st.integers(0, 300)))
def test_an_answer_is_the_same_however_its_text_arrives(
    case: tuple[str, str], cuts: list[int]
) -> None:
    template, said = case
    bounds = [0, *sorted(cut % (len(said) + 1) for cut in cuts), len(said)]
    pieces = [said[start:stop] for start, stop in pairwise(bounds)]

    assert parts_of(template, pieces) == parts_of(template, [said])


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|message|>"),
    *("<|start|>assistant", "<|channel|>final", "<|end|>", "<|call|>", COMMENTARY, FINAL),
    *('{"name": "look", "arguments": {}}', "{", "}", "[", "]", '"', "\\", " ", "\n", "a", "look"),
    *(in_xml("look", city="Bern"), "<function=look>", "</function>", "<|", "<tool", "[TOOL"),
]


@pytest.mark.parametrize(
    "template", [HERMES_TEMPLATE, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_XML, HARMONY]
)
@given(
    said=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_odd_answers_are_the_same_however_their_text_arrives(
    template: str, said: str, cuts: list[int]
) -> None:
    bounds = [0, *sorted(cut % (len(said) + 1) for cut in cuts), len(said)]
    pieces = [said[start:stop] for start, stop in pairwise(bounds)]

    assert (
        parts_of(template, pieces) == parts_of(template, list(said)) == parts_of(template, [said])
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "template", [HERMES_TEMPLATE, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_XML]
)
def test_white_space_is_held_without_delay(template: str) -> None:
    # A reader that looks at all of it for each token takes minutes.
    said = " \n" * 150_000

    assert parts_of(template, list(said)) == [said]
    assert parts_of(template, ["So", *said, "."]) == [f"So{said}."]


VALUES = [
    ("city", "7", '"7"'),
    ("city", "null", '"null"'),
    ("city", ' a\n"b" ', '" a\\n\\"b\\" "'),
    ("city", "\n", '"\\n"'),
    ("city", "</parameter> a</function>", '"</parameter> a</function>"'),
    ("days", "12345678901234567890123", "12345678901234567890123"),
    ("days", "many", '"many"'),
    ("note", "null", "null"),
    ("note", "5", '"5"'),
    ("wet", "true", "true"),
    ("wet", "True", "true"),
    ("wet", "None", "null"),
    ("parts", '[{"a": 1.0}]', '[{"a": 1.0}]'),
    ("any", "[1]", '"[1]"'),
    ("unknown", "5", '"5"'),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_a_value_in_xml_is_a_string_unless_the_schema_says_otherwise(
    name: str, value: str, expected: str
) -> None:
    [call] = parts_of(QWEN_XML, [in_xml("look", **{name: value})])

    assert isinstance(call, ToolCall)
    assert call.arguments_json == f'{{"{name}": {expected}}}'


def test_values_of_an_unknown_tool_in_xml_are_strings() -> None:
    [call] = parts_of(QWEN_XML, [in_xml("other", days="7")])

    assert call == ToolCall("other", '{"days": "7"}', "id")


def test_a_value_in_xml_with_half_a_character_makes_no_call() -> None:
    said = in_xml("look", parts='["\\ud800"]')

    assert parts_of(QWEN_XML, [said]) == [said]


@pytest.mark.parametrize("streams", [False, True])
def test_channels_are_reasoning_and_content_with_and_without_tools(streams: bool) -> None:
    text, tokenizer = model_of(HARMONY)
    said = f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Yes.<|return|>"

    for tools in ([], [TOOL]):
        [choice] = openai_says(text, ended(tokenizer, said), streams=streams, tools=tools)
        assert (choice.thought, choice.text, choice.reason) == ("Hm.", "Yes.", "stop")
    message = anthropic_says(text, ended(tokenizer, said), streams=streams)
    assert (message.thought, message.text, message.blocks) == ("Hm.", "Yes.", ("thinking", "text"))


@pytest.mark.parametrize("streams", [False, True])
def test_arguments_with_an_open_quote_do_not_take_the_next_message(streams: bool) -> None:
    text, tokenizer = model_of(HARMONY)
    broken = f'{COMMENTARY}{{"city": "Bern<|end|>'
    said = f"{broken}{FINAL}Yes.<|end|><|start|>assistant{COMMENTARY}{{}}"

    [choice] = openai_says(text, ended(tokenizer, said), streams=streams, tools=[TOOL])

    assert (choice.text, choice.calls) == (f"{broken}Yes.", [("look", "{}")])


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_in_tags_is_apart_from_text_and_calls_on_request(streams: bool) -> None:
    text, tokenizer = a_text(template=QWEN_XML + "{#- <think></think> #}")
    call = in_xml("look", city="Bern")
    said = ended(tokenizer, f"<think>I could write {call}.</think>\n\n{call}")

    [apart] = openai_says(text, said, streams=streams, tools=[TOOL], separate_reasoning=True)
    [text_first] = openai_says(text, said, streams=streams, tools=[TOOL])

    assert (apart.thought, apart.text) == (f"I could write {call}.", "")
    assert apart.calls == [("look", '{"city": "Bern"}')]
    assert (text_first.thought, text_first.calls) == ("", apart.calls)
    assert text_first.text == f"<think>I could write {call}.</think>"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("template", [QWEN_XML, LLAMA, MISTRAL_NAMED, HERMES_TEMPLATE])
def test_calls_that_reasoning_drafts_are_not_made(template: str, streams: bool) -> None:
    text, tokenizer = a_text(template=template + "{#- <think></think> #}")
    draft = {
        QWEN_XML: in_xml("look", city="Bern"),
        LLAMA: '<|python_tag|>{"name": "look", "parameters": {}}',
        MISTRAL_NAMED: "[TOOL_CALLS]look[ARGS]{}",
        HERMES_TEMPLATE: '<tool_call>{"name": "look"}</tool_call>',
    }[template]
    for said in (
        f"<think>\nSo {draft}\n</think>\n\nNo. ",
        f"<think>{draft}</think>",
        f"<think>So {draft}",
        "<think></think>\n",
        "<think",
    ):
        [choice] = openai_says(text, ended(tokenizer, said), streams=streams, tools=[TOOL])
        assert (choice.text, choice.thought, choice.calls) == (said, "", [])
    [made] = openai_says(
        text,
        ended(tokenizer, f"<think>\nSo {draft}\n</think>\n\n{draft}"),
        streams=streams,
        tools=[TOOL],
    )
    assert (made.text, len(made.calls)) == (f"<think>\nSo {draft}\n</think>", 1)


@pytest.mark.parametrize("template", [LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_XML, HARMONY])
def test_without_tools_no_call_is_read(template: str) -> None:
    text, tokenizer = model_of(template)
    said = next(case[1] for case in CALLS if case[0] == template)

    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        [choice] = openai_says(text, ended(tokenizer, said), streams=False, **fields)
        assert choice.calls == []
        assert choice.reason == "stop"


HISTORY = [
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "look", "arguments": {"days": 1E2}}\n</tool_call>'),
    (LLAMA, '{"name": "look", "parameters": {"days": 1E2}}'),
    (
        MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "look", "arguments": {"days": 1E2}, "id": "c1f8a7b2e"}]',
    ),
    (MISTRAL_NAMED, '[TOOL_CALLS]look[CALL_ID]c1f8a7b2e[ARGS]{"days": 1E2}'),
    (QWEN_XML, "<tool_call>\n<function=look>\n<parameter=days>\n1E2\n</parameter>\n</function>"),
    (HARMONY, ' to=functions.look<|channel|>commentary json<|message|>{"days": 1E2}<|call|>'),
]


@pytest.mark.parametrize(("template", "written"), HISTORY)
@pytest.mark.parametrize("identity", ["c1f8a7b2e", "call_0123456789abcdef01234567"])
def test_earlier_calls_and_results_are_rendered_by_the_template(
    template: str, written: str, identity: str
) -> None:
    # Marks are no special tokens, so that the prompt shows them.
    text, _ = a_text(template=template)
    function = {"name": "look", "arguments": '{"days": 1E2}'}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": identity, "function": function}]},
        {"role": "tool", "tool_call_id": identity, "content": "wet"},
    ]
    body = orjson.dumps({"model": "m", "messages": messages, "tools": [TOOL]})

    prompt = text.decode(read_chat(body).ask(text).prompts[0])

    if identity in written or "c1f8a7b2e" not in written:
        assert written in prompt
    else:
        [(call, result)] = [
            (prompt.split(mark)[1][:9], prompt.split("[TOOL_RESULTS]")[1][:9])
            for mark in ('"id": "', "[CALL_ID]")
            if mark in prompt
        ]
        assert call == result
        assert call.isalnum()
    assert "wet" in prompt


def test_calls_of_mistrals_models_have_ids_that_their_templates_accept() -> None:
    text, _ = model_of(MISTRAL_NAMED)
    reader = text.reader(FUNCTIONS)
    assert reader is not None

    found = [*reader.add("[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"), *reader.finish()]

    ids = {part.id for part in found if isinstance(part, ToolCall)}
    assert len(ids) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_reasoning_of_earlier_messages_is_rendered_in_its_channel() -> None:
    text, _ = a_text(template=HARMONY)
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"function": function}]}

    def rendered(**fields: str) -> str:
        messages = [{"role": "user", "content": "hi"}, {**call, **fields}]
        body = orjson.dumps({"model": "m", "messages": messages, "tools": [TOOL]})
        return text.decode(read_chat(body).ask(text).prompts[0])

    assert "analysis<|message|>Hm.<|end|>" in rendered(reasoning_content="Hm.")
    # The template has no place for both, and refuses them.
    assert "Let me.<|end|>" in rendered(reasoning_content="Hm.", content="Let me.")


def test_tools_of_a_template_in_another_format_are_refused_with_the_known_ones() -> None:
    text, _ = a_text(template="{{ tools }}<tool_call>name<arg_key>{{ messages[0].content }}")
    body = orjson.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    )

    with pytest.raises(InvalidRequest, match=r"^tools: .*Hermes, .*Harmony, Llama"):
        read_chat(body).ask(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (HARMONY, "<|channel|>commentary to=functions.look" + " " * 50_000 + "<|message|>{}"),
        (HARMONY, "<|channel|>final" + " " * 50_000 + "!<|message|>{}"),
        (HARMONY, "<|channel|>commentary to=" + "a" * 100_000 + " b c<|message|>"),
        (HARMONY, "<|channel|>commentary to=" + "a" * 900 + " b c<|message|>"),
        (HARMONY, "<|channel|>" * 100_000),
        (HARMONY, "<|start|>" * 100_000),
        (HARMONY, f'{COMMENTARY}"' + "<|channel|>" * 100_000),
        (HARMONY, f'{COMMENTARY}"<|start|>' * 20_000),
        (HARMONY, f"{COMMENTARY}{{<|call|>" * 20_000),
        (HARMONY, "<|channel|>final<|message|>" + "<|end|>" * 100_000),
        (MISTRAL_NAMED, "[TOOL_CALLS]" + "a" * 50_000 + " " * 50_000 + "{}"),
        (QWEN_XML, "<tool_call><function=look>" + "</parameter> \n" * 20_000 + "</function>"),
        (LLAMA, "{" + " " * 50_000 + '"name"' + " " * 50_000),
    ],
    ids=[
        *("Harmony", "no channel", "long recipient", "recipient", "channels", "starts", "ends"),
        *("open quote", "open quotes", "no objects"),
        *("Mistral", "Qwen", "Llama"),
    ],
)
def test_odd_answers_are_read_without_delay(template: str, said: str) -> None:
    parts = parts_of(template, [said])

    assert len(parts) == 1
    assert isinstance(parts[0], ToolCall) or parts[0] == said.removeprefix(f"{FINAL_ONLY}<|end|>")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["anyOf", "oneOf"])
def test_schemas_that_refer_to_themselves_are_read_without_delay(kind: str) -> None:
    to_itself = {"$ref": "#/$defs/a"}
    many = {kind: [{"$ref": f"#/$defs/{n}"} for n in range(60)] * 2}
    schema = {
        "properties": {"a": to_itself, "b": {"$ref": "#/$defs/0"}},
        "$defs": {"a": {kind: [to_itself, dict(to_itself)]}, **{str(n): many for n in range(60)}},
    }
    known = format_of(QWEN_XML)
    assert known is not None
    reader = known.reader([Function("f", schema, "tools.0")])
    assert reader is not None

    [call] = [*reader.add(in_xml("f", a="1", b="2")), *reader.finish()]

    assert isinstance(call, ToolCall)
    assert call.arguments_json == '{"a": "1", "b": "2"}'
    with pytest.raises(InvalidRequest, match=r"tools\.0\.a: the schema has no alternatives"):
        known.source(AnswerRule(functions=[Function("f", schema, "tools.0")]), Reasoning.NONE)


ODD_SCHEMAS: list[dict[str, Any]] = [
    {"properties": None},
    {"properties": []},
    {"properties": {"a": True}, "required": None},
    {"properties": {"a": False}, "required": 5},
    {"properties": {"a": {}}, "required": [{}, ["a"]]},
    {"properties": {"a": None}, "additionalProperties": 7},
    {"properties": {"a": {"anyOf": [True, None, 5]}}},
    {"properties": {"a": {"anyOf": None, "oneOf": {"type": "string"}}}},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"type": "string", "enum": None, "const": "1"}}},
    {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": -1}}},
    {"properties": {"a": {"type": "string", "minLength": 1.5, "maxLength": True}}},
    {"properties": {"a": {"type": {}, "items": 3, "properties": 3}}},
    {"properties": {"a": {"$ref": 5, "allOf": [None]}}, "allOf": 3, "$defs": None},
    {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": []},
]
"""What no JSON schema is, or none that says anything."""


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=repr)
def test_odd_schemas_in_xml_mean_what_can_be_read_of_them(schema: dict[str, Any]) -> None:
    known = format_of(QWEN_XML)
    assert known is not None
    function = Function("f", schema, "tools.0")
    reader = known.reader([function])
    assert reader is not None

    [call] = reader.add(in_xml("f", a="1"))

    assert isinstance(call, ToolCall)
    assert call.arguments_json == '{"a": "1"}'
    with suppress(InvalidRequest):
        known.source(AnswerRule(functions=[function]), Reasoning.NONE)


def test_types_of_alternatives_in_xml_are_found_behind_references() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}, {"items": {}}]}},
    }
    known = format_of(QWEN_XML)
    assert known is not None
    reader = known.reader([Function("f", schema, "tools.0")])
    assert reader is not None

    [call] = reader.add(in_xml("f", a="1"))

    assert isinstance(call, ToolCall)
    assert call.arguments_json == '{"a": 1}'


MANY_MARKS = {
    "quotes": (HERMES_TEMPLATE, '<tool_call>"</tool_call>' * 200_000),
    "empty": (HERMES_TEMPLATE, "<tool_call></tool_call>" * 200_000),
    "open": (HERMES_TEMPLATE, "<tool_call>x" * 100_000),
    "one end": (HERMES_TEMPLATE, "<tool_call>x" * 100_000 + "</tool_call>"),
    "objects": (HERMES_TEMPLATE, '<tool_call>{"a": [1, ' * 100_000),
    "XML": (QWEN_XML, "<tool_call></tool_call>" * 100_000),
    "open XML": (QWEN_XML, "<tool_call><function=f>" * 50_000),
    "open functions": (QWEN_XML, "<tool_call>" + "<function=" * 400 + "</tool_call>" * 50_000),
    "list": (MISTRAL_LIST, "[TOOL_CALLS]" * 100_000 + "[" * 50_000),
    "names": (MISTRAL_NAMED, "[TOOL_CALLS]a" * 100_000),
    "one name": (MISTRAL_NAMED, "[TOOL_CALLS]a" * 100_000 + "[ARGS]{5}"),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize(("template", "said"), MANY_MARKS.values(), ids=MANY_MARKS)
def test_many_marks_that_begin_no_call_are_read_without_delay(template: str, said: str) -> None:
    assert parts_of(template, [said]) == [said]


def test_long_calls_in_xml_are_searched_once_for_their_end() -> None:
    said = in_xml("look", city="</tool_call>x" * 20_000)
    known = format_of(QWEN_XML)
    assert known is not None
    reader = known.reader(FUNCTIONS)
    assert reader is not None

    [call] = [p for at in range(0, len(said), 4) for p in reader.add(said[at : at + 4])]

    assert isinstance(call, ToolCall)
    assert len(json.loads(call.arguments_json)["city"]) == 13 * 20_000


def test_the_example_of_a_template_writes_calls_as_they_are_read() -> None:
    arguments = {"city": 'Bern "1"', "days": 2}
    called = {"function": {"name": "look", "arguments": arguments}}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "So.", "tool_calls": [called, called]},
        {"role": "tool", "content": "rain"},
    ]
    text, tokenizer = a_text(template=EXAMPLE)
    render: Any = tokenizer.apply_chat_template

    rendered = render(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)

    prompt, _, rest = rendered.partition("<|im_start|>assistant\n")
    written, _, end = rest.partition("<|im_end|>")
    said = [*tokenizer.encode(written), EOS_TOKEN_ID]
    [choice] = openai_says(text, said, streams=False, tools=[TOOL])
    assert json.dumps(SCHEMA) in prompt
    assert choice.text == "So."
    assert [(name, json.loads(given)) for name, given in choice.calls] == [("look", arguments)] * 2
    assert end.endswith(
        "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tool" not in render(messages[:1], tokenize=False)
