"""Requests in OpenAI's and Anthropic's formats, and their errors."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_worker.chat.anthropic_messages import read_count_tokens, read_messages
from tinkercloud_worker.chat.openai_requests import read_chat, read_completion
from tinkercloud_worker.chat.text import ChatText

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}=<tool_call>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{% if shout %}!{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_NAMES = st.sampled_from(
    [
        *("model", "messages", "role", "content", "type", "text", "tools", "function", "name"),
        *("prompt", "stop", "n", "max_tokens", "system", "tool_calls", "arguments", "input"),
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)


def a_text(template: str = TEMPLATE) -> ChatText:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ChatText(tokenizer)


def rendered(text: ChatText, **fields: Any) -> str:
    content = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return text.decode(read_chat(orjson.dumps(content)).ask(text).prompts[0])


def test_a_conversation_is_rendered_by_the_template_of_the_model() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    text = rendered(a_text(), messages=messages, tools=[TOOL], chat_template_kwargs={"shout": True})

    assert text == "add=<tool_call>[system|be kind][assistant|7][tool|9]>!"


def test_tools_need_a_template_with_calls_in_a_known_format() -> None:
    with pytest.raises(InvalidRequest, match=r"^tools: "):
        rendered(a_text("{% for m in messages %}{{ m.content }}{% endfor %}"), tools=[TOOL])
    assert rendered(a_text(), tools=[TOOL], tool_choice="none") == "[user|hi]>"


def test_a_model_without_template_has_completions_only() -> None:
    text = ChatText(byte_tokenizer())
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(text)
    assert read_completion(b'{"model": "m", "prompt": "ab"}').ask(text).params.max_tokens == 16


def test_an_error_of_the_template_is_one_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match="only users"):
        rendered(a_text("{{ raise_exception('only users') }}"))


def test_the_last_assistant_message_of_anthropic_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "My"}]
    body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": messages})
    text = a_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")

    assert text.decode(read_messages(body).ask(text).prompts[0]) == "[hi][My"


NUMBERS = "[123456789012345678901234, -0, 1e400, 1E5, 0.10, 1.5, 7, %s]" % ("8" * 4100)
"""Numbers that a reader and writer of JSON may change, and others."""
SCHEMA = f'{{"type": "object", "properties": {{"a": {{"enum": {NUMBERS}}}}}}}'
WITH_TOOLS = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.parameters | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
)


def test_numbers_keep_their_digits_from_openais_requests_to_the_prompt() -> None:
    text = a_text(WITH_TOOLS)
    arguments = json.dumps(f'{{"a": {NUMBERS}, "s": "\\ud800"}}')
    body = (
        '{"model": "m", "temperature": 0.70, "tools": [{"type": "function", "function":'
        f' {{"name": "f", "parameters": {SCHEMA}}}}}], "messages": [{{"role": "assistant",'
        f' "tool_calls": [{{"function": {{"name": "f", "arguments": {arguments}}}}}]}}]}}'
    )

    asked = read_chat(body.encode()).ask(text)

    assert asked.params.temperature == 0.7
    assert text.decode(asked.prompts[0]) == (
        f'<tool_call>{SCHEMA}[{{"a": {NUMBERS}, "s": "\\ud800"}}{NUMBERS}]'
    )


def test_numbers_keep_their_digits_from_anthropics_requests_to_the_prompt() -> None:
    text = a_text(WITH_TOOLS)
    body = (
        f'{{"model": "m", "max_tokens": 5, "tools": [{{"name": "f", "input_schema": {SCHEMA}}}],'
        ' "messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f",'
        f' "id": "t", "input": {{"a": {NUMBERS}}}}}]}}]}}'
    )

    prompt = text.decode(read_messages(body.encode()).ask(text).prompts[0])

    assert prompt == f'<tool_call>{SCHEMA}[{{"a": {NUMBERS}}}{NUMBERS}]'


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_a_call_of_the_history_without_arguments_has_none(arguments: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]

    assert rendered(a_text(WITH_TOOLS), messages=messages) == "[{}]"


@pytest.mark.parametrize(
    "arguments", ['"Beijing"', "not json", "[1]", "7", "null", "{} {}", '{"a": NaN}', "[" * 5000]
)
def test_arguments_of_the_history_that_are_no_object_are_refused_by_name(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    wrong = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, wrong]},
    ]

    with pytest.raises(InvalidRequest, match=r"^messages\.1\.tool_calls\.1\.function\.arguments: "):
        rendered(a_text(WITH_TOOLS), messages=messages)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": NaN}',
        b'{"model": "m", "max_tokens": -Infinity}',
        b'{"model": "\\ud800"}',
        b'{"model": "m", "\\udc00": 1}',
        b'{"model": "\xff"}',
        b'{"model": "m"} {}',
        b'{"model": 01}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the request body is not valid JSON: "):
        read_chat(body)


PREFILLS = ["My", "x ", "x\n\n", " x", "  x \t", "", " ", "a<b>{{ c }}", "x\n y "]


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.role + '\n' }}{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.role + '\n' }}{{ m.content | trim }}]{% endfor %}",
    ],
)
def test_a_message_that_is_continued_keeps_all_its_white_space(template: str, prefill: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": prefill}]
    body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": messages})
    text = a_text(template)

    prompt = text.decode(read_messages(body).ask(text).prompts[0])

    assert prompt == f"[user\nhi][assistant\n{prefill}"


@pytest.mark.parametrize("content", ["{{ m.content | upper }}", "text", "{{ m.content[:4] }}"])
def test_a_template_that_changes_the_message_to_continue_is_an_error(content: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "My text"}]
    body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": messages})
    text = a_text("{% for m in messages %}" + content + "{% endfor %}")

    with pytest.raises(InvalidRequest, match="last message, which is to be continued"):
        read_messages(body).ask(text)


EFFORT = "{{ reasoning_effort | default('medium') }}|{{ messages[0].content }}"


def test_the_reasoning_effort_reaches_templates_that_use_it() -> None:
    text = a_text(EFFORT)

    assert rendered(text) == "medium|hi"
    assert rendered(text, reasoning_effort="high") == "high|hi"
    same = {"reasoning_effort": "low"}
    assert rendered(text, reasoning_effort="low", chat_template_kwargs=same) == "low|hi"


@pytest.mark.parametrize(
    ("template", "fields", "words"),
    [
        (TEMPLATE, {"reasoning_effort": "high"}, "has no variable reasoning_effort"),
        (EFFORT, {"reasoning_effort": "enormous"}, "'low'"),
        (
            EFFORT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "differs",
        ),
    ],
)
def test_a_reasoning_effort_that_would_be_lost_is_refused_by_name(
    template: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^reasoning_effort: .*{words}"):
        rendered(a_text(template), **fields)


DEFAULTS: dict[str, Any] = {
    "best_of": 1,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "bad_words": [],
    "stop_token_ids": [],
    "length_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "guided_json": None,
    "allowed_token_ids": None,
    "priority": 0,
    "detokenize": True,
    "logit_bias": {},
}
"""Fields of vLLM with the values that mean what is done anyway."""


ANTHROPIC: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
}
ADAPTIVE = {"type": "adaptive"}
CLEARS = {"type": "clear_tool_uses_20250919"}


def test_the_effort_of_anthropics_clients_reaches_templates_that_use_it() -> None:
    text = a_text(EFFORT)

    for effort in ("low", "max", None):
        fields = {"thinking": ADAPTIVE, "output_config": {"effort": effort}}
        request = {**ANTHROPIC, **fields}
        expected = f"{effort or 'medium'}|hi"
        [prompt] = read_messages(orjson.dumps(request)).ask(text).prompts
        del request["max_tokens"]
        counted = read_count_tokens(orjson.dumps(request)).tokens(text)

        assert text.decode(prompt) == text.decode(counted) == expected


def test_what_anthropics_agents_always_send_changes_no_conversation_without_a_place_for_it() -> (
    None
):
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    fields = {"output_config": {"effort": "high"}, "context_management": keeps}
    text = a_text()

    [plain] = read_messages(orjson.dumps(ANTHROPIC)).ask(text).prompts
    [prompt] = read_messages(orjson.dumps({**ANTHROPIC, **fields})).ask(text).prompts

    assert prompt == plain


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"context_management": {"edits": [CLEARS]}}, r"context_management: .*leave it out, or"),
        ({"output_config": {"effort": "huge"}}, r"output_config\.effort: .*'max'"),
        ({"output_config": {"task_budget": {}}}, r"output_config\.task_budget: .*; leave it out"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, r"thinking\.type: .*'adaptive'"),
        ({"thinking": ADAPTIVE | {"budget_tokens": 9}}, r"thinking\.budget_tokens: .*leave it out"),
        ({"thinking": ADAPTIVE | {"display": "omitted"}}, r"thinking\.display: .*'summarized'"),
    ],
)
def test_settings_of_anthropics_reasoning_that_would_be_lost_are_refused_by_name(
    fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"(?s){where}"):
        read_messages(orjson.dumps({**ANTHROPIC, **fields})).ask(a_text())


def test_fields_of_other_servers_are_accepted_with_their_neutral_values() -> None:
    assert rendered(a_text(), **DEFAULTS, echo=False, include_reasoning=True) == "[user|hi]>"
    completion = {"model": "m", "prompt": "ab", "add_special_tokens": True, **DEFAULTS}
    assert read_completion(orjson.dumps(completion)).ask(TEXT).offered is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("best_of", 2), ("min_tokens", 5), ("length_penalty", 0.9), ("ignore_eos", True)),
        *(("skip_special_tokens", False), ("stop_token_ids", [2]), ("guided_json", {})),
        *(("allowed_token_ids", [1]), ("bad_words", ["x"]), ("echo", True), ("priority", 3)),
    ],
)
def test_fields_of_other_servers_are_refused_by_name_with_other_values(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: this server does not support it"):
        rendered(a_text(), **{field: value})


@given(st.dictionaries(_NAMES, _JSON, max_size=6))
@pytest.mark.parametrize("read", [read_chat, read_completion, read_messages])
def test_any_json_is_read_or_refused(read: Any, content: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "max_tokens": 2, **content}).encode()
    try:
        read(body).ask(TEXT)
    except InvalidRequest:
        event("refused")


TEXT = a_text()
