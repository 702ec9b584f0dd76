"""Sequences end with the token that completes a stop string, in any tokenizer and script."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_protocol.requests.tensors import SampledSequence, TopLogprobs
from tinkercloud_testing.small_models.text_tokenizers import (
    OF_BYTES,
    TEXTS,
    TOKENIZERS,
    a_tokenizer,
    encode,
)
from tinkercloud_testing.training.engines import a_sampling_request
from tinkercloud_worker.engine.sampling.growing_text import Decode, decoder_of
from tinkercloud_worker.engine.sampling.sampler_interface import StopRules
from tinkercloud_worker.engine.sampling.stopping import StopStringSearch, cut_at_stop


def first_by_the_whole_text(
    tokens: Sequence[int], strings: Sequence[str], decode: Decode, prompt: Sequence[int]
) -> int | None:
    """Return after how many tokens the text holds a string: all of it decoded each time."""
    before = decode(prompt).rstrip("\ufffd")
    for count in range(1, len(tokens) + 1):
        whole = decode([*prompt, *tokens[:count]])
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
        text = whole[len(list(shared)) :]
        if any(string in text for string in strings):
            return count
    return None


def first_found(
    tokens: Sequence[int], strings: Sequence[str], decode: Decode, prompt: Sequence[int]
) -> int | None:
    search = StopStringSearch(strings, decode, prompt)
    return next((n for n, token in enumerate(tokens, 1) if search.completes(token)), None)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Draw pieces of texts of several scripts, one after another."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(TEXTS))
        start = draw(st.integers(0, len(text) - 1))
        parts.append(text[start : start + draw(st.integers(1, 12))])
    return "".join(parts)


@st.composite
def stops_of(draw: st.DrawFn, decoded: str) -> list[str]:
    """Draw stop strings: pieces of the text, or of others."""
    strings = []
    for _ in range(draw(st.integers(1, 3))):
        source = decoded if decoded.strip("\ufffd") and draw(st.booleans()) else draw(texts())
        start = draw(st.integers(0, len(source) - 1))
        strings.append(source[start : start + draw(st.integers(1, 9))])
    # No text is certain to hold half a character.
    return [string for string in strings if "\ufffd" not in string] or ["###"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_where_decoding_the_whole_text_finds_it(
    name: str, data: st.DataObject
) -> None:
    decode = decoder_of(a_tokenizer(name))
    prompt = encode(name, data.draw(texts())) or [3]
    tokens = encode(name, data.draw(texts()))
    strings = data.draw(stops_of(decode(tokens)))

    expected = first_by_the_whole_text(tokens, strings, decode, prompt)

    assert first_found(tokens, strings, decode, prompt) == expected


@pytest.mark.parametrize("name", OF_BYTES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_between_bytes_that_are_no_characters(
    name: str, data: st.DataObject
) -> None:
    decode = decoder_of(a_tokenizer(name))
    noise = st.lists(st.integers(0, 258), max_size=12)
    prompt = [*encode(name, data.draw(texts())), *data.draw(noise)] or [3]
    tokens = [
        token
        for _ in range(data.draw(st.integers(1, 3)))
        for token in (*data.draw(noise), *encode(name, data.draw(texts())))
    ]
    strings = data.draw(stops_of(decode(tokens)))

    expected = first_by_the_whole_text(tokens, strings, decode, prompt)

    assert first_found(tokens, strings, decode, prompt) == expected


@pytest.mark.parametrize("name", ["bytes", "bytes in Python", "byte-level BPE"])
@pytest.mark.parametrize("stop", ["🧬🧬🧬", "👩‍👩‍👧‍👦", "日本語の文章", "नमस्ते", "𒀀𒁀𒂀"])
def test_a_stop_string_may_take_any_number_of_tokens(name: str, stop: str) -> None:
    tokens = encode(name, "x" + stop + "y")
    decode = decoder_of(a_tokenizer(name))

    assert first_found(tokens, [stop], decode, encode(name, "a")) == (
        first_by_the_whole_text(tokens, [stop], decode, encode(name, "a"))
    )
    assert first_found(tokens, [stop], decode, encode(name, "a")) is not None


@pytest.mark.parametrize(("stop", "count"), [(" Human", 1), ("Human", 1), ("n H", 2)])
def test_the_space_before_a_samples_first_word_is_part_of_its_text(stop: str, count: int) -> None:
    tokenizer = a_tokenizer("SentencePiece BPE with byte fallback")
    vocabulary = tokenizer.get_vocab()
    human, fox = vocabulary["▁Human"], vocabulary["▁fox"]
    assert tokenizer.decode([human]) == "Human"

    assert first_found([human, human], [stop], decoder_of(tokenizer), [fox]) == count


def test_a_character_that_the_prompt_begins_ends_a_sequence_when_it_is_complete() -> None:
    *start, last = encode("bytes", "🧬")

    decode = decoder_of(a_tokenizer("bytes"))
    assert first_found([last], ["🧬"], decode, [65, *start]) == 1


def test_spaces_before_punctuation_are_part_of_a_text() -> None:
    tokenizer = a_tokenizer("byte-level BPE")
    tokenizer.clean_up_tokenization_spaces = True
    tokens = encode("byte-level BPE", "fox .")

    assert first_found(tokens, [" ."], decoder_of(tokenizer), [65]) == len(tokens)


def a_sequence(tokens: Sequence[int], *, stopped: bool) -> SampledSequence:
    count = len(tokens)
    top = TopLogprobs(
        np.arange(count, dtype=np.int32)[:, None], np.zeros((count, 1), dtype=np.float32)
    )
    return SampledSequence(list(tokens), [-float(n) for n in range(count)], stopped, top)


@pytest.mark.parametrize("stopped", [False, True])
def test_tokens_after_a_stop_string_are_cut_off(stopped: bool) -> None:
    text = "ab🧬🧬🧬cd"
    request = a_sampling_request([65], stop=StopRules(frozenset(), ("🧬🧬🧬",)))
    drawn = a_sequence(encode("bytes", text), stopped=stopped)

    cut = cut_at_stop(drawn, request, decoder_of(a_tokenizer("bytes")))

    wanted = encode("bytes", "ab🧬🧬🧬")
    assert list(cut.tokens) == wanted
    assert list(cut.logprobs) == list(drawn.logprobs[: len(wanted)])
    assert cut.stopped
    assert cut.top is not None
    assert cut.top.token_ids[:, 0].tolist() == list(range(len(wanted)))


@pytest.mark.parametrize(("text", "stopped"), [("ab🧬", True), ("abcd", False)])
def test_a_sequence_that_ends_at_a_stop_string_is_unchanged(text: str, stopped: bool) -> None:
    request = a_sampling_request([65], stop=StopRules(frozenset({300}), ("🧬",)))
    drawn = a_sequence(encode("bytes", text), stopped=stopped)

    assert cut_at_stop(drawn, request, decoder_of(a_tokenizer("bytes"))) is drawn
