"""The bytes of tokens, also of those that are a part of a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tinkercloud_testing.models import byte_tokenizer
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
