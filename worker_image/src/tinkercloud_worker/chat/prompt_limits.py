"""Limits of prompts in text, which are checked before their tokens are kept.

The tokens of a text take a hundred times its bytes while a tokenizer makes them, so a text that is
far too long is tokenized in pieces, only as far as its refusal is certain.
"""

from collections.abc import Callable

from tinkercloud_protocol.wire.errors import ContextLengthExceeded, InvalidRequest

_PIECE_CHARACTERS = 1 << 16
_CUT_TOKENS = 32
"""More tokens than a cut within a word, or within the name of a special token, can add."""
_CHARACTERS_PER_TOKEN = 4
"""Shorter texts are tokenized at once: their tokens are at most some times the limit."""
_MAX_VALUES = 1 << 22
_MAX_OBJECTS = 1 << 18
"""Parsed, an object or a value takes up to a hundred times its text."""


def check_text(text: str, max_tokens: int, count: Callable[[str], int], field: str) -> None:
    """Check that a text may have few enough tokens.

    Args:
        text: the text.
        max_tokens: the context length of the model.
        count: returns the number of tokens of a text.
        field: the field of the request that the text is from.

    Raises:
        ContextLengthExceeded: it certainly has more tokens.
    """
    if len(text) <= _CHARACTERS_PER_TOKEN * max_tokens:
        return
    least = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        least += max(count(text[start : start + _PIECE_CHARACTERS]) - _CUT_TOKENS, 0)
        if least > max_tokens:
            raise ContextLengthExceeded(field, f"at least {least}", max_tokens)


def check_body(body: bytes) -> None:
    """Check the number of values in a JSON body before it is parsed.

    Raises:
        InvalidRequest: there are too many.
    """
    for mark, most in ((b",", _MAX_VALUES), (b"{", _MAX_OBJECTS)):
        if (number := body.count(mark)) > most:
            raise InvalidRequest(
                f"the request body has {number} times {mark.decode()!r}; at most {most} are"
                " accepted. Send shorter messages, or fewer prompts per request"
            )
