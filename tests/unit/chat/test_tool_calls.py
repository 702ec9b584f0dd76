"""Tool calls are what the model wrote: as calls with its own arguments, or as text."""

import pytest

from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_testing.small_models.said import a_text, anthropic_says, openai_says
from tinkercloud_worker.chat.answer_parts import ToolCall
from tinkercloud_worker.chat.rules.answer_rules import ANY_OBJECT, Function
from tinkercloud_worker.chat.tool_formats.known import HERMES
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader

TEXT, _ = a_text()
TOKENIZER = byte_tokenizer()
DEEP = "[" * 5000 + "]" * 5000


def a_reader() -> CallReader:
    reader = HERMES.reader([Function("f", ANY_OBJECT, "tools.0")])
    assert reader is not None
    return reader


def call(arguments: str, key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "lookup", "{key}": {arguments}}}\n</tool_call>'


def tag(content: str) -> str:
    return f"<tool_call>{content}</tool_call>"


EXACT = [
    '{"order_id": 12345678901234567890123}',
    '{"order_id": -9223372036854775809, "next": 18446744073709551616}',
    '{"a": 1e400, "b": -1E-400, "c": 0.1000000000000000055511151231257827, "d": 1.0, "e": -0}',
    '{"a": %s}' % ("9" * 4200),
    '{"a":1,"a":2,   "b" :[ ]}',
    '{"a": "\\u00e9\\n\\/\\ud83d\\ude00 é"}',
    '{"a": "\\ud800"}',
    '{"a": "</tool_call>", "b": "<tool_call>"}',
    '{"a": "\\"</tool_call>\\\\"}',
    '{\n  "a": {"arguments": {"name": "x"}}\n}',
    '{"a": "{\\"b\\": 1}"}',
    "{}",
]
"""Arguments that a reader and writer of JSON may change."""


@pytest.mark.parametrize("arguments", EXACT)
@pytest.mark.parametrize("streams", [False, True])
def test_arguments_are_the_models_own_characters(arguments: str, streams: bool) -> None:
    said = [*TOKENIZER.encode(call(arguments)), 256]

    [choice] = openai_says(TEXT, said, streams=streams, tools=True)
    message = anthropic_says(TEXT, said, streams=streams, tools=True, max_tokens=9000)

    assert choice.calls == message.calls == [("lookup", arguments)]
    assert (choice.text, choice.reason, message.reason) == ("", "tool_calls", "tool_use")


CALLS = [
    (call('{"order_id": 7}', "parameters"), [("lookup", '{"order_id": 7}')]),
    (tag('{"name": "now"}'), [("now", "{}")]),
    (tag('{"arguments": {"a": 1}, "name": "f", "id": 3}'), [("f", '{"a": 1}')]),
    (call('"{\\"order_id\\": 12345678901234567890123}"'), [("lookup", EXACT[0])]),
    (call('" {\\"a\\": \\"\\\\u00e9\\"}\\n"'), [("lookup", '{"a": "\\u00e9"}')]),
    (call('"{}"', "parameters"), [("lookup", "{}")]),
    (tag('{"name": "a"}\n{"name": "b", "arguments": {"x": 1}}'), [("a", "{}"), ("b", '{"x": 1}')]),
    (tag('[{"name": "a"}, {"name": "b"}]'), [("a", "{}"), ("b", "{}")]),
    (tag('{"n\\u0061me": "f\\u00e9"}'), [("fé", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f}</tool_call>' + tag('{"name": "g"}'), [("g", "{}")]),
    ('<tool_call>{"a": "</tool_call>' + tag('{"name": "g"}'), [("g", "{}")]),
]


@pytest.mark.parametrize(("text", "expected"), CALLS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_may_be_written_in_several_ways(
    text: str, expected: list[tuple[str, str]], streams: bool
) -> None:
    [choice] = openai_says(TEXT, [*TOKENIZER.encode(text), 256], streams=streams, tools=True)

    assert choice.calls == expected


TEXTS = [
    call("null"),
    call("[1]"),
    call("7"),
    call('""'),
    call('"Beijing"'),
    call('"[1]"'),
    call('"{} {}"'),
    call('"{\\"a\\": \\"\\ud800\\"}"'),
    call('{"a": NaN}'),
    call('{"a": Infinity}'),
    call('{"a": 01}'),
    call('{"a": 1,}'),
    call("{'a': 1}"),
    call('{"a": "line\nbreak"}'),
    call(f'{{"a": {DEEP}}}'),
    tag('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}'),
    tag('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}'),
    tag('{"name": "f", "name": "g"}'),
    tag('{"name": ""}'),
    tag('{"name": "\\ud800"}'),
    tag('{"name": ["f"]}'),
    tag('{"arguments": {}}'),
    tag("[]"),
    tag('[{"name": "f"}, 5]'),
    tag('[{"name": "f"}] x'),
    tag('{"name": "f"}{"name": 5}'),
    tag('{"name": "f"}, {"name": "g"}'),
    tag(""),
    tag("\n"),
    "<tool_call>",
    "<tool_call>\n",
    " <tool_call",
    "</tool_call>",
    "a \n",
    " \n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_no_certain_call_is_text_as_it_was_written(text: str, streams: bool) -> None:
    said = [*TOKENIZER.encode(text), 256]

    [choice] = openai_says(TEXT, said, streams=streams, tools=True)
    message = anthropic_says(TEXT, said, streams=streams, tools=True, max_tokens=20000)

    assert (choice.text, choice.calls, choice.reason) == (text, [], "stop")
    assert (message.text, message.reason, message.blocks) == (text, "end_turn", ("text",))


SPACED = [
    (f"Sure. \n{call('{}')}\n{call('{}')}\n", "Sure.", ("text", "tool_use", "tool_use")),
    (f"\n\n{call('{}')}", "", ("tool_use",)),
    (f"{call('{}')}\n\nDone. \n", "Done. \n", ("tool_use", "text")),
    (f"I use <tool_call> tags.\n{call('{}')}", "I use <tool_call> tags.", ("text", "tool_use")),
    (
        f'"<tool_call> is a <tool_call>.{call("{}")}{call("{}")}',
        '"<tool_call> is a <tool_call>.',
        ("text", "tool_use", "tool_use"),
    ),
    (f"a\n{tag('no')}\n{call('{}')} b", f"a\n{tag('no')}b", ("text", "tool_use", "text")),
]


@pytest.mark.parametrize(("text", "shown", "blocks"), SPACED)
@pytest.mark.parametrize("streams", [False, True])
def test_white_space_around_calls_is_no_content(
    text: str, shown: str, blocks: tuple[str, ...], streams: bool
) -> None:
    said = [*TOKENIZER.encode(text), 256]

    [choice] = openai_says(TEXT, said, streams=streams, tools=True)
    message = anthropic_says(TEXT, said, streams=streams, tools=True)

    assert choice.text == message.text == shown
    assert message.blocks == blocks


def test_text_before_a_call_is_not_kept_back_until_the_call_ends() -> None:
    parser = a_reader()

    assert parser.add('Let me see.\n<tool_call>{"name": ') == ["Let me see."]
    [found] = parser.add('"f"}</tool_call>')
    assert isinstance(found, ToolCall)


def test_long_calls_are_searched_once_for_their_end() -> None:
    parser = a_reader()
    text = call('{"a": "%s"}' % ("</tool_call>x\\\\" * 20_000))
    parts = [part for at in range(0, len(text), 4) for part in parser.add(text[at : at + 4])]

    assert len(parts) == 1
    assert isinstance(parts[0], ToolCall)
