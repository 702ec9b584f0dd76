"""From the fields of a request to the texts that its answer may be."""

import json
from typing import Any

import orjson
import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer
from tinkercloud_worker.chat.answer_parts import Thought
from tinkercloud_worker.chat.anthropic_messages import read_messages
from tinkercloud_worker.chat.grammar.grammars import Grammars
from tinkercloud_worker.chat.openai_requests import read_chat
from tinkercloud_worker.chat.rules.answer_rules import Reasoning
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.chat.thoughts import ThoughtSplitter
from tinkercloud_worker.engine.sampling.token_grammar import TokenGrammar

# New grammars are tried in processes of their own.
pytestmark = pytest.mark.timeout(180)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}<tool_call>{% endfor %}"
    "{{ messages[0].content }}{% if start is defined %}{{ start }}{% endif %}"
)
THINKS = TEMPLATE + "{# <think></think> #}"
USER = [{"role": "user", "content": "hi"}]
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Grammars] = {}


def a_tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": NUMBER, **fields}}


def a_call(name: str, arguments: str = '{"n": 7}') -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def grammar_of(read: Any, fields: dict[str, Any], template: str = TEMPLATE) -> TokenGrammar | None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    text = ChatText(tokenizer)
    asked = read(orjson.dumps({"model": "m", "messages": USER, **fields})).ask(text)
    if asked.rule is None:
        return None
    grammars = GRAMMARS.setdefault(template, Grammars())
    return grammars.compile(asked.rule, text, {EOS_TOKEN_ID}, asked.prompts[0])


def openai(template: str = TEMPLATE, **fields: Any) -> TokenGrammar | None:
    return grammar_of(read_chat, fields, template)


def anthropic(**fields: Any) -> TokenGrammar | None:
    return grammar_of(read_messages, {"max_tokens": 9, **fields})


def accepts(grammar: TokenGrammar | None, text: str) -> bool:
    """Return whether a sample may be this text, and end after it."""
    assert grammar is not None
    matcher = grammar.matcher()
    for token in byte_tokenizer().encode(text):
        if not matcher.allowed({EOS_TOKEN_ID})[token]:
            return False
        matcher.add(token)
    return bool(matcher.allowed({EOS_TOKEN_ID})[EOS_TOKEN_ID])


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(
    "text",
    ['{"n":7}', '{"n": 42}', '{\n  "n": 0\n}', '{\r\n\t"n"\n:7 }'],
)
def test_an_answer_in_json_may_have_white_space_as_models_write_it(text: str) -> None:
    assert accepts(openai(response_format=schema_format(NUMBER)), text)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"n":100}', '{"n":7} ', '{"n":7}{"n":7}', '{"n":7,"m":1}', '{   "n":7}', "Hi", "7"],
)
def test_an_answer_that_breaks_the_schema_or_surrounds_it_is_excluded(text: str) -> None:
    assert not accepts(openai(response_format=schema_format(NUMBER)), text)


def test_a_json_object_has_any_members() -> None:
    grammar = openai(response_format={"type": "json_object"})

    assert accepts(grammar, '{"a": [1, {"b": null}], "ü": "x\\n"}')
    assert not accepts(grammar, "[1]")


def test_requests_without_a_rule_are_not_constrained() -> None:
    tools = [a_tool("f")]
    assert openai() is None
    assert openai(tools=tools) is None
    assert openai(tools=tools, tool_choice="auto", parallel_tool_calls=True) is None
    assert openai(tools=[a_tool("f", strict=True)], tool_choice="none") is None
    assert openai(response_format={"type": "text"}, parallel_tool_calls=False) is None
    assert anthropic(tools=[{"name": "f", "input_schema": NUMBER}]) is None
    assert anthropic(output_config={}) is None


def test_required_calls_are_one_or_more_in_the_format_of_the_template() -> None:
    grammar = openai(tools=[a_tool("f"), a_tool('a"b ü')], tool_choice="required")

    assert accepts(grammar, a_call("f"))
    assert accepts(grammar, "\n".join([a_call("f"), a_call('a"b ü').replace("\\u00fc", "ü")]))
    assert not accepts(grammar, "")
    assert not accepts(grammar, "I call it. " + a_call("f"))
    assert not accepts(grammar, a_call("g"))
    assert not accepts(grammar, a_call("f", "{}"))
    assert not accepts(grammar, a_call("f") + " Done.")


def test_calls_of_models_that_write_no_line_breaks_are_accepted() -> None:
    call = a_call("f").replace("\n", "")
    required = openai(tools=[a_tool("f")], tool_choice="required")
    strict = openai(tools=[a_tool("f", strict=True)])

    assert accepts(required, call)
    assert accepts(required, call + call)
    assert accepts(strict, "So: " + call)


def test_one_call_is_one() -> None:
    tools: Any = [a_tool("f"), a_tool("g")]
    named = {"type": "function", "function": {"name": "g"}}
    for grammar in (
        openai(tools=tools, tool_choice="required", parallel_tool_calls=False),
        openai(tools=tools, tool_choice=named),
    ):
        assert accepts(grammar, a_call("g"))
        assert not accepts(grammar, a_call("g") + "\n" + a_call("g"))
    assert not accepts(openai(tools=tools, tool_choice=named), a_call("f"))


def test_a_strict_tool_constrains_the_calls_in_free_text() -> None:
    grammar = openai(tools=[a_tool("f", strict=True)])

    assert accepts(grammar, "Hello <tool_cal> {")
    assert accepts(grammar, "")
    assert accepts(grammar, f"I look.\n{a_call('f')}\n{a_call('f')} So.")
    assert not accepts(grammar, a_call("f", '{"n": "7"}'))
    assert not accepts(grammar, "The tag <tool_call> begins a call.")


def test_without_parallel_calls_free_text_has_at_most_one() -> None:
    grammar = openai(tools=[a_tool("f")], parallel_tool_calls=False)

    assert accepts(grammar, "Hello.")
    assert accepts(grammar, "I look. " + a_call("f"))
    assert not accepts(grammar, a_call("f") + "\n" + a_call("f"))


def test_with_tools_and_a_schema_the_answer_is_a_call_or_json() -> None:
    grammar = openai(tools=[a_tool("f")], response_format=schema_format(NUMBER))

    assert accepts(grammar, '{"n": 1}')
    assert accepts(grammar, a_call("f"))
    assert not accepts(grammar, "Hello.")


@pytest.mark.parametrize(
    ("start", "before", "excluded"),
    [
        ("", ["", "<think>Well.</think>\n\n", "<think></think>"], ["Well.</think>"]),
        ("<think>\n", ["Well, {\n</think>\n\n"], ["", "<think>Well."]),
        ("<think>\n\n</think>\n\n", [""], ["Well.</think>", "<think>Well.</think>"]),
    ],
    ids=["possible", "open", "closed"],
)
def test_a_rule_applies_after_the_reasoning_of_the_template(
    start: str, before: list[str], excluded: list[str]
) -> None:
    options = {"chat_template_kwargs": {"start": start}}
    tools = [a_tool("f")]
    for grammar, form in (
        (openai(THINKS, response_format=schema_format(NUMBER), **options), '{"n": 1}'),
        (openai(THINKS, tools=tools, tool_choice="required", **options), a_call("f")),
    ):
        assert all(accepts(grammar, each + form) for each in before)
        assert not any(accepts(grammar, each + form) for each in excluded)


def test_anthropics_choices_mean_the_same() -> None:
    tools = [{"name": name, "input_schema": NUMBER} for name in ("f", "g")]
    any_tool = anthropic(tools=tools, tool_choice={"type": "any"})
    one = {"type": "any", "disable_parallel_tool_use": True}
    at_most_one = {"type": "auto", "disable_parallel_tool_use": True}
    form = {"format": {"type": "json_schema", "schema": NUMBER}}
    two = a_call("f") + "\n" + a_call("g")

    assert accepts(any_tool, two)
    assert not accepts(anthropic(tools=tools, tool_choice=one), two)
    assert not accepts(anthropic(tools=tools, tool_choice={"type": "tool", "name": "f"}), two)
    assert not accepts(anthropic(tools=tools, tool_choice=at_most_one), two)
    assert accepts(anthropic(tools=tools, tool_choice=at_most_one), "Hello.")
    assert accepts(anthropic(output_config=form), '{"n": 3}')


def test_the_schema_of_a_tool_and_its_strictness_stay_as_they_were_in_the_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = ChatText(tokenizer)
    body = {"model": "m", "messages": USER, "tools": [a_tool("f", strict=True)]}

    (prompt,) = read_chat(orjson.dumps(body)).ask(text).prompts

    assert text.decode(prompt) == (
        json.dumps({"name": "f", "parameters": NUMBER}) + "<tool_call>hi"
    )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": 2**53 + 1}, r"2\*\*53"),
        ({"maximum": -1e300}, r"2\*\*53"),
        ({"enum": ["x" * 70_000]}, "65536 characters"),
        ({"if": {}}, 'Unimplemented keys: \\["if"\\]'),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^response_format: .*{words}"):
        openai(response_format=schema_format(schema))
    tools = [a_tool("g"), a_tool("f", parameters=schema)]
    with pytest.raises(InvalidRequest, match=rf"^tools\.1\.function\.parameters: .*{words}"):
        openai(tools=tools, tool_choice="required")


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"items": [schema]}

    with pytest.raises(InvalidRequest, match=r"^response_format: .* more than 64 levels"):
        openai(response_format=schema_format(schema))


def test_numbers_of_a_schema_with_other_digits_keep_their_value() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format":'
        b' {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1.10, 2E1]}}}}'
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = ChatText(tokenizer)
    asked = read_chat(body).ask(text)
    assert asked.rule is not None
    grammar = Grammars().compile(asked.rule, text, {EOS_TOKEN_ID}, asked.prompts[0])

    assert accepts(grammar, "1.1")
    assert accepts(grammar, "20")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("reasoning", "said", "thought", "text"),
    [
        (Reasoning.POSSIBLE, '<think>Well.\n</think>\n\n{"n": 1}', "Well.\n", '{"n": 1}'),
        (Reasoning.POSSIBLE, "<think></think>7", "", "7"),
        (Reasoning.POSSIBLE, '"<think>"', "", '"<think>"'),
        (Reasoning.POSSIBLE, "<thi", "", "<thi"),
        (Reasoning.POSSIBLE, "<think>Well.</thi", "Well.</thi", ""),
        (Reasoning.OPEN, 'A < b.</think>\n\n"</think>"', "A < b.", '"</think>"'),
        (Reasoning.NONE, '"</think>"', "", '"</think>"'),
    ],
)
def test_reasoning_is_separated_from_json(
    reasoning: Reasoning, said: str, thought: str, text: str, size: int
) -> None:
    splitter = ThoughtSplitter(reasoning)
    parts = [
        part for at in range(0, len(said), size) for part in splitter.add(said[at : at + size])
    ]
    parts += splitter.finish()

    assert "".join(part for part in parts if isinstance(part, Thought)) == thought
    assert "".join(part for part in parts if not isinstance(part, Thought)) == text
