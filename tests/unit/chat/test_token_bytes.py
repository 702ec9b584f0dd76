"""The bytes of tokens, including tokens that are only part of a character."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_worker.chat import openai_requests
from tinkercloud_worker.chat.openai_answers import CompletionAnswer, ScoredToken
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.chat.token_bytes import TokenBytes


def a_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Llama 2: words, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(
        vocabulary, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@given(st.text(max_size=20))
@pytest.mark.parametrize(
    ("tokenizer", "before"),
    [(byte_tokenizer(), b""), (a_sentencepiece_tokenizer(), b" ")],
    ids=["byte-level", "byte fallback"],
)
def test_the_bytes_of_its_tokens_make_up_a_text(
    tokenizer: PreTrainedTokenizerFast, before: bytes, text: str
) -> None:
    bytes_of = TokenBytes(tokenizer).of
    found = [bytes_of(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    assert b"".join(each or b"?" for each in found) == (before + text.encode() if text else b"")


def test_special_tokens_have_the_bytes_of_their_name() -> None:
    assert TokenBytes(byte_tokenizer()).of(256) == b"<|end|>"


def test_a_tokenizer_of_words_defines_no_bytes() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    bytes_of = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words)).of

    assert bytes_of(0) is None
    assert bytes_of(5) is None


SENTENCEPIECE = a_sentencepiece_tokenizer()
BOS = SENTENCEPIECE.bos_token_id


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("a a", [0, 1]),
        (" a", [0, 0]),
        ([BOS, "\u2581a", "b", "\u2581", "\u2581a"], [0, 0, 1, 2, 3]),
        (["\u2581", "\u2581a", "<0xC3>", "<0xB1>", "b"], [0, 0, 2, 2, 3]),
        (["b", "\u2581a"], [0, 1]),
        ([BOS], [0]),
    ],
)
def test_the_offsets_of_an_echoed_prompt_lead_to_its_tokens_in_the_text(
    prompt: str | list[int | str], offsets: list[int]
) -> None:
    text = ChatText(SENTENCEPIECE)
    if isinstance(prompt, list):
        names = SENTENCEPIECE.convert_tokens_to_ids
        given: Any = [each if isinstance(each, int) else names(each) for each in prompt]
    else:
        given = prompt
    body = {"model": "m", "prompt": given, "echo": True, "logprobs": 0, "max_tokens": 1}
    request = openai_requests.read_completion(orjson.dumps(body))
    asked = request.ask(text)
    answer = CompletionAnswer(request, asked, text)
    scored = [ScoredToken(token, None, None) for token in asked.prompts[0]]
    assert asked.echoed is not None

    answer.keep_prompt(0, asked.echoed[0], scored)
    event = orjson.loads(answer.add(0, asked.echoed, scored).removeprefix(b"data: "))

    found = event["choices"][0]["logprobs"]["text_offset"]
    assert found == offsets
