"""Tokenizers of folders that have only a SentencePiece model are loaded."""

import json
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

WORDS = ("train", "model", "tinker", "token", "piece", "house", "green", "river")


def test_a_folder_with_only_a_sentencepiece_model_is_tokenized_like_its_model(
    tmp_path: Path,
) -> None:
    text = "\n".join(" ".join(WORDS[n % 8 :] + WORDS[: n % 8]) for n in range(200))
    (tmp_path / "text").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    fields = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))

    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)

    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for sample in ("train model", "green house river", "a token é"):
        ids = loaded.encode(sample, add_special_tokens=False)
        assert ids == model.encode(sample)
        assert loaded.decode(ids) == sample
