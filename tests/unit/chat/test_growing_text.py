"""Text that grows token by token: whole characters, stop strings and tool calls."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer
from tinkercloud_testing.small_models.text_tokenizers import (
    OF_BYTES,
    TEXTS,
    TOKENIZERS,
    a_tokenizer,
    encode,
)
from tinkercloud_worker.chat.answer_parts import ToolCall
from tinkercloud_worker.chat.rules.answer_rules import ANY_OBJECT, Function
from tinkercloud_worker.chat.text import ChatText, ShownText, UntilStop
from tinkercloud_worker.chat.tool_formats.known import HERMES
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader
from tinkercloud_worker.engine.sampling.growing_text import GrowingText, decoder_of

TOKENIZER = byte_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def a_reader() -> CallReader:
    reader = HERMES.reader([Function("f", ANY_OBJECT, "tools.0")])
    assert reader is not None
    return reader


def grown(tokens: list[int], prompt: list[int]) -> list[str]:
    text = ShownText(ChatText(TOKENIZER), prompt, ends=(), stops=())
    return [*map(text.add, tokens), text.finish()]


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(bounds)]


@given(st.text(max_size=20), st.text(max_size=5))
def test_the_parts_of_a_text_make_up_the_text(text: str, prompt: str) -> None:
    parts = grown(TOKENIZER.encode(text), TOKENIZER.encode(prompt))

    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts if "\ufffd" not in text)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_not_kept_back_for_long(tokens: list[int]) -> None:
    parts = grown(tokens, [])

    assert len("".join(parts)) > 0 or not tokens
    assert all(any(parts[at : at + 9]) for at in range(max(len(tokens) - 8, 0)))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_text_is_what_its_tokens_add_to_the_prompt_in_any_tokenizer(
    name: str, data: st.DataObject
) -> None:
    prompt, text = (data.draw(st.sampled_from(TEXTS)) for _ in range(2))
    tokens = [*encode(name, prompt), *encode(name, " " + text)]
    split = data.draw(st.integers(1, len(tokens) - 1))
    decode = decoder_of(a_tokenizer(name))

    growing = GrowingText(decode, tokens[:split])
    grown = "".join(map(growing.add, tokens[split:])) + growing.finish()

    # A token may be the end of a character and the beginning of the next; with byte fallback,
    # an incomplete character makes those before it incomplete.
    before = [decode(tokens[:count]) for count in range(split + 1)]
    complete = max((each for each in before if not each.endswith("\ufffd")), key=len)
    assert max(before[-1].rstrip("\ufffd"), complete, key=len) + grown == decode(tokens)


@pytest.mark.parametrize("name", ["SentencePiece BPE with byte fallback", *OF_BYTES])
@pytest.mark.parametrize("prompt", ["世", "a 世", "世\ufffd世", "x🧬🧬", "世界", "é"])
@pytest.mark.parametrize("started", [1, 2, 3])
def test_a_text_begins_with_the_character_that_it_completes(
    name: str, prompt: str, started: int
) -> None:
    tokens = encode(name, prompt)
    started = min(started, len(encode(name, prompt[-1])) - 1)
    split = len(tokens) - started
    growing = GrowingText(decoder_of(a_tokenizer(name)), tokens[:split])

    parts = [growing.add(token) for token in [*tokens[split:], *encode(name, "界")]]

    assert "".join(parts) + growing.finish() == (prompt[-1] if started else "") + "界"


def test_special_tokens_have_no_text() -> None:
    assert "".join(grown([*TOKENIZER.encode("é"), EOS_TOKEN_ID], [])) == "é"


@given(st.text("aé ", max_size=9), st.text("b ", max_size=9), st.integers(0, 100))
def test_repeated_special_tokens_are_not_decoded_again_and_again(
    before: str, after: str, repeats: int
) -> None:
    tokens = [*TOKENIZER.encode(before), *[EOS_TOKEN_ID] * repeats, *TOKENIZER.encode(after)]
    most = 0
    text = ChatText(TOKENIZER)
    decode = text.decode_all

    def watched(tokens: Sequence[int]) -> str:
        nonlocal most
        most = max(most, len(tokens))
        return decode(tokens)

    text.decode_all = watched
    shown = ShownText(text, [], ends=(), stops=())
    parts = [*map(shown.add, tokens), shown.finish()]

    assert "".join(parts) == before + after
    assert most < 40


@given(
    st.text("ab", max_size=12), st.lists(st.integers(0, 12)), st.text("ab", min_size=1, max_size=3)
)
def test_nothing_of_a_stop_string_is_passed_on(text: str, cuts: list[int], stop: str) -> None:
    until = UntilStop([stop])
    passed = "".join(until.add(piece) for piece in in_pieces(text, cuts)) + until.finish()

    assert passed == text.partition(stop)[0]
    assert until.found == (stop if stop in text else None)


@given(st.lists(st.integers(0, 90)))
def test_a_call_is_found_however_its_text_arrives(cuts: list[int]) -> None:
    parser = a_reader()
    parts = [p for piece in in_pieces(f"Let me see.{CALL}ok", cuts) for p in parser.add(piece)]
    parts += parser.finish()
    calls = [part for part in parts if isinstance(part, ToolCall)]

    assert "".join(part for part in parts if isinstance(part, str)) == "Let me see.ok"
    assert [(call.name, call.arguments_json) for call in calls] == [("add", '{"a": 2}')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "a < b and <tool",
        "<tool_call>unfinished",
    ],
)
def test_text_that_is_no_call_stays_text(text: str) -> None:
    parser = a_reader()
    assert "".join(map(str, [*parser.add(text), *parser.finish()])) == text
