"""Special tokens and stop strings: one text for samplers and answers, whole and streamed."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID
from tinkercloud_testing.small_models.said import a_text as a_chat_text
from tinkercloud_testing.small_models.said import anthropic_says, completion_says, openai_says
from tinkercloud_worker.chat.text import ChatText

TEXT, TOKENIZER = a_chat_text()
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"order_id": 7}}\n</tool_call>'
HARMONY = ("<|channel|>", "<|message|>", "<|start|>")
STOPPED = [
    # What the model says, the stop strings, and the text, the stop string, and how much is sampled.
    ("Hi<|im_start|>user", ["<|im_start|>user"], "Hi", "<|im_start|>user", 7),
    ("Hi<|im_start|>", ["<|im_start|>"], "Hi", "<|im_start|>", 3),
    ("Hi<|im_start|>user", ["im_start|>us"], "Hi", "im_start|>us", 5),
    ("a<|im_start|>b c d", ["ab"], "ab c d", None, 8),
    ("a<|x|>bc", ["a<|x|>b"], "", "a<|x|>b", 3),
    ("ab<|x|>c", ["b<|x|>d"], "abc", None, 5),
    ("x\nUser: y", ["\nUser:"], "x", "\nUser:", 7),
    ("one two", ["two", "one t"], "", "one t", 5),
    ("abcd", ["abcd", "bc"], "a", "bc", 3),
    ("abcd", ["c", "bc"], "a", "bc", 3),
    ("Hi<|im_end|>", ["i<|im_end|>"], "H", "i<|im_end|>", 3),
    ("Hi<|im_end|>", ["i<|im_end|>x"], "Hi", None, 3),
    ("世界", ["界"], "世", "界", 6),
    ("", ["x"], "", None, 1),
]


def said(text: str) -> list[int]:
    ended = text if text.endswith("<|im_end|>") else text + "<|end|>"
    return list(TOKENIZER.encode(ended))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", STOPPED)
def test_nothing_of_a_stop_string_is_left_in_an_answer_of_any_format(
    case: tuple[str, list[str], str, str | None, int], streams: bool
) -> None:
    text, stops, shown, found, sampled = case
    tokens = said(text)
    chat = openai_says(TEXT, tokens, streams=streams, stop=stops, n=3)
    completion = completion_says(TEXT, tokens, streams=streams, stop=stops, n=2)
    message = anthropic_says(TEXT, tokens, streams=streams, stop_sequences=stops)

    assert {(each.text, each.reason) for each in (*chat, *completion)} == {(shown, "stop")}
    assert len(chat) + len(completion) == 5
    assert (message.text, message.stop) == (shown, found)
    assert message.reason == ("end_turn" if found is None else "stop_sequence")
    assert message.num_tokens == sampled


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_that_may_become_a_stop_string_is_not_lost_at_the_length(streams: bool) -> None:
    [choice] = openai_says(TEXT, said("abX"), streams=streams, stop=["bX"], max_tokens=2)
    [stopped] = openai_says(TEXT, said("abX"), streams=streams, stop=["bX"], max_tokens=3)
    message = anthropic_says(
        TEXT, said("abX"), streams=streams, stop_sequences=["bX"], max_tokens=2
    )

    assert (choice.text, choice.reason) == ("ab", "length")
    assert (stopped.text, stopped.reason) == ("a", "stop")
    assert (message.text, message.reason, message.stop) == ("ab", "max_tokens", None)


@pytest.mark.parametrize("streams", [False, True])
def test_special_tokens_without_meaning_for_clients_are_hidden(streams: bool) -> None:
    tokens = said("a<|x|><|im_start|>b<|x|>")

    [choice] = openai_says(TEXT, tokens, streams=streams)
    [completion] = completion_says(TEXT, tokens, streams=streams)

    assert choice.text == completion.text == "ab"
    assert TEXT.decode(tokens) == "ab"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("special", [("<tool_call>", "</tool_call>"), ("<tool_call>",), ()])
def test_tool_calls_are_found_whether_their_tags_are_special_or_not(
    special: tuple[str, ...], streams: bool
) -> None:
    text, tokenizer = a_chat_text(*special)
    tokens = tokenizer.encode(f"Sure.\n{CALL}<|im_end|>")

    [choice] = openai_says(text, tokens, streams=streams, tools=True)
    [unasked] = openai_says(text, tokens, streams=streams)
    message = anthropic_says(text, tokens, streams=streams, tools=True)

    assert (choice.text, choice.reason) == ("Sure.", "tool_calls")
    assert choice.calls == message.calls == [("lookup", '{"order_id": 7}')]
    assert message.blocks == ("text", "tool_use")
    assert message.reason == "tool_use"
    assert (unasked.text, unasked.reason) == (f"Sure.\n{CALL}", "stop")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("special", "text"),
    [
        (("<think>", "</think>"), "<think>\nhm\n</think>\n\nYes"),
        (("[THINK]", "[/THINK]"), "[THINK]hm[/THINK]Yes"),
        (("<|START_THINKING|>", "<|END_THINKING|>"), "<|START_THINKING|>hm<|END_THINKING|>Yes"),
        (("<seed:think>", "</seed:think>"), "<seed:think>hm</seed:think>Yes"),
        (
            (*HARMONY, "<|call|>"),
            "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>Yes",
        ),
    ],
)
def test_marks_of_reasoning_stay_in_the_text_if_they_are_special(
    special: tuple[str, ...], text: str, streams: bool
) -> None:
    model, tokenizer = a_chat_text(*special)
    tokens = tokenizer.encode(text + "<|im_end|>")

    [choice] = openai_says(model, tokens, streams=streams)
    message = anthropic_says(model, tokens, streams=streams)

    assert choice.text == message.text == text


def test_tools_are_refused_if_the_tokenizer_can_not_write_their_tag() -> None:
    text, tokenizer = a_chat_text()
    assert text.calls_tools
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("_", "-")

    assert not text.calls_tools


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_within_a_call_leaves_no_call(streams: bool) -> None:
    [choice] = openai_says(TEXT, said(CALL), streams=streams, tools=True, stop=["order"])

    assert (choice.calls, choice.reason) == ([], "stop")
    assert choice.text == CALL.partition("order")[0]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_sequence_after_a_call_leaves_the_call(streams: bool) -> None:
    tokens = said(f"{CALL}\nSTOP")
    message = anthropic_says(TEXT, tokens, streams=streams, tools=True, stop_sequences=["STOP"])

    assert (message.reason, message.stop, message.blocks) == ("tool_use", None, ("tool_use",))


def test_templates_of_models_with_several_are_used_by_their_names() -> None:
    tools = "{% for tool in tools %}<tool_call>{{ tool.function.name }}{% endfor %}<|im_end|>"
    text, _ = a_chat_text(template={"default": "plain", "tool_use": tools})
    refused, _ = a_chat_text(template={"default": tools, "tool_use": "tools in another way"})
    message = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "add"}}

    assert text.decode(text.render([message], [tool], {})) == "<tool_call>add"
    assert text.decode(text.render([message], [], {})) == "plain"
    assert text.turn_ends == frozenset(TOKENIZER.encode("<|im_end|>"))
    with pytest.raises(InvalidRequest, match=r"^tools: "):
        refused.render([message], [tool], {})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "prompt", ["世", "a世", "世\ufffd世", "x🧬", "世界", "\ufffd\ufffd世", "é"]
)
@pytest.mark.parametrize("started", [1, 2, 3])
def test_a_completion_begins_with_the_character_that_it_completes(
    prompt: str, started: int, streams: bool
) -> None:
    tokens = TOKENIZER.encode(prompt)
    started = min(started, len(prompt[-1].encode()) - 1)
    rest = [*tokens[len(tokens) - started :], *TOKENIZER.encode("界!"), EOS_TOKEN_ID]
    given = tokens[: len(tokens) - started]

    [completion] = completion_says(TEXT, rest, streams=streams, prompt=given)

    assert completion.text == prompt[-1] + "界!"


@pytest.mark.parametrize("form", ["a list", "files"])
def test_named_templates_of_a_models_folder_are_found(tmp_path: Path, form: str) -> None:
    tools = "{% for tool in tools %}<tool_call>{{ tool.function.name }}{% endfor %}<|im_end|>"
    _, tokenizer = a_chat_text(template={"default": "plain", "tool_use": tools})
    tokenizer.save_pretrained(tmp_path)
    if form == "a list":
        file = tmp_path / "tokenizer_config.json"
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": tools}]
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
        (tmp_path / "chat_template.jinja").unlink()
        shutil.rmtree(tmp_path / "additional_chat_templates")
    text = ChatText(AutoTokenizer.from_pretrained(tmp_path))
    tool = {"type": "function", "function": {"name": "add"}}

    prompt = text.render([{"role": "user", "content": "hi"}], [tool], {})

    assert text.decode(prompt) == "<tool_call>add"
    assert text.turn_ends == frozenset(TOKENIZER.encode("<|im_end|>"))
