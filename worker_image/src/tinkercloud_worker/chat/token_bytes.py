"""The bytes that tokens stand for, also those of tokens that are a part of a character.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) write each byte as a character of its own; tokenizers
with byte fallback (Llama 2, Gemma, Mistral) have a token `<0xE4>` for each byte.
"""

import json
import re
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_SPACE = "\u2581"
"""How SentencePiece writes a space in its tokens."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character in the tokens of a byte-level tokenizer.

    Printable characters of Latin-1 are their own; the others follow from U+0100 on, in order.
    """
    alphabet = set(ByteLevel.alphabet())
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in range(256) if chr(byte) in alphabet} | shifted


class TokenBytes:
    """The bytes of the tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        steps = _decoding_steps(getattr(tokenizer, "backend_tokenizer", None))
        self._characters = _byte_of_character() if "ByteLevel" in steps else None
        self._has_fallback = "ByteFallback" in steps
        self._added = {
            index: str(token.content).encode()
            for index, token in tokenizer.added_tokens_decoder.items()
        }

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if its tokenizer does not define them."""
        if (added := self._added.get(token)) is not None:
            return added
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return None
        if (characters := self._characters) is not None:
            is_known = all(character in characters for character in name)
            return bytes(characters[character] for character in name) if is_known else None
        if not self._has_fallback:
            return None
        byte = _BYTE.fullmatch(name)
        return name.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


def _decoding_steps(backend: Any) -> set[str]:  # noqa: ANN401 - of the tokenizers package
    """Return the types of the steps by which a tokenizer decodes."""
    if backend is None or backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {str(step["type"]) for step in [decoder, *decoder.get("decoders", ())]}
