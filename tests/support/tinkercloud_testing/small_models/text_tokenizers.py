"""Small tokenizers of the kinds that public models have, and texts of several scripts."""

from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tinkercloud_testing.small_models.models import byte_tokenizer

TEXTS = [
    "The quick brown fox\n\nHuman: jumps over the lazy dog. ### User:",
    "<|im_end|> def f(x):\n    return x ** 2  # comment",
    "Übermäßig große Äpfel, né à Besançon, façade, naïve",
    "Быстрая коричневая лиса",
    "日本語の文章です。漢字とかな",
    "한국어 문장입니다",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "ภาษาไทย",
    "🧬🧬🧬 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 é",
    "𒀀𒁀𒂀 𓀀𓁀 𐎀𐎁𐎂",
]
CORPUS = [*TEXTS, *(text.lower() for text in TEXTS)]


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _byte_level_bpe() -> PreTrainedTokenizerFast:
    """Like GPT-2, Llama 3 and Qwen: pieces are bytes, also halves of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


def _sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """Like Llama 2 and Mistral: a text's first space is dropped, rare characters are bytes."""
    words = ["▁Human", "▁the", "▁fox", "▁", "▁▁", "Human", "a", "e", "日", "é"]
    letters = sorted({letter for text in TEXTS[:2] for letter in text if letter.isalpha()})
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1}
    for piece in (*(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters):
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _fast(tokenizer)


def _unigram() -> PreTrainedTokenizerFast:
    """Like T5: words begin with a mark that is decoded as a space, but at the beginning."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


def _wordpiece() -> PreTrainedTokenizerFast:
    """Like BERT: continued words are marked, and spaces are not written down at all."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": byte_tokenizer,
    "bytes in Python": ByT5Tokenizer,
    "byte-level BPE": _byte_level_bpe,
    "SentencePiece BPE with byte fallback": _sentencepiece_bpe,
    "SentencePiece unigram": _unigram,
    "WordPiece": _wordpiece,
}
OF_BYTES = ["bytes", "bytes in Python", "byte-level BPE"]


@cache
def a_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer of a kind, a key of `TOKENIZERS`."""
    made: PreTrainedTokenizerBase = TOKENIZERS[name]()
    return made


def encode(name: str, text: str) -> list[int]:
    """Return the tokens of a text by a kind of tokenizer, without special ones."""
    return list(a_tokenizer(name).encode(text, add_special_tokens=False))
