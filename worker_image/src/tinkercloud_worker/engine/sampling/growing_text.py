"""The text of a sequence, token by token: one definition for samplers, stop strings and answers.

The text of a sequence is what its tokens add to the text of the prompt: a tokenizer that drops the
space before the first word of a text keeps the one between prompt and sample, and a character that
the prompt begins belongs to the sequence that completes it. Special tokens are part of the text.

A character that takes several tokens is complete with its last token. For each new token, only the
tokens since the last complete character are decoded, after the tokens of that character, which some
decoders need as context. So the cost per token does not depend on the length of the sequence.
"""

from collections.abc import Callable, Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""

INCOMPLETE = "\ufffd"
"""Decoded text of bytes that do not form a (complete) character."""
_CHARACTER_TOKENS = 4
"""Maximum number of tokens of one character, which has at most four bytes in UTF-8."""
_CONTEXT_TOKENS = 3 * _CHARACTER_TOKENS
_MAX_HELD_TOKENS = 8
"""Tokens without a complete character after which their text is certain anyway."""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return an exact decoder of a tokenizer, which keeps special tokens and all spaces."""

    def decode(tokens: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return decode


class GrowingText:
    """Decodes a sequence token by token, and returns complete characters."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        """Start before the first token.

        Args:
            decode: the decoder of the model's tokenizer.
            prompt: token ids before the sequence.
        """
        self._decode = decode
        self.pending = ""
        """Text that follows what was returned, but may still become another character."""
        self._context: list[int] = []
        """Tokens whose text is complete."""
        self._context_text = ""
        self._newest: list[int] = []
        """The tokens since."""
        self._num_started = 0
        """How many of those come from the prompt, or from before the last certain text."""
        self._passed = ""
        """Text of the newest tokens that was returned, or belongs to the prompt."""
        self._continue_after(prompt)

    def add(self, token: int) -> str:
        """Append a token; return the text that has become certain."""
        self._newest.append(token)
        added = self._added()
        new = _after(self._passed, added)
        num_held = len(self._newest) - self._num_started
        if added.endswith(INCOMPLETE) and num_held <= _MAX_HELD_TOKENS:
            certain = new.rstrip(INCOMPLETE)
            self.pending = new[len(certain) :]
            if certain:
                self._passed = added.removesuffix(self.pending)
            return certain
        self.pending = ""
        if new or self._passed:
            self._continue_after([*self._context, *self._newest])
        else:
            # Some decoders have no text for the beginning of a character.
            del self._newest[: 1 - _CHARACTER_TOKENS]
        return new

    def finish(self) -> str:
        """Return the rest of the text, which may be an incomplete character."""
        rest, self.pending = self.pending, ""
        self._continue_after([*self._context, *self._newest])
        return rest

    def _continue_after(self, tokens: Sequence[int]) -> None:
        """Make tokens, whose text was returned or belongs to the prompt, the context of the next.

        Of an incomplete character at their end, the text is what the next tokens make of it.
        """
        self._context, self._newest = split_at_character(tokens, self._decode)
        self._context_text = self._decode(self._context)
        self._num_started = len(self._newest)
        self._passed = self._added()

    def _added(self) -> str:
        """Return what the newest tokens add to the text of their context."""
        text = self._decode([*self._context, *self._newest])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # With byte fallback, complete characters are decoded differently before incomplete ones.
        # Bytes are decoded in the same way at the beginning of a text.
        return self._decode(self._newest)


def split_at_character(tokens: Sequence[int], decode: Decode) -> tuple[list[int], list[int]]:
    """Split the last tokens of a text before a character that may be incomplete.

    Returns:
        Tokens of some complete characters, as context of what follows, and the tokens after them.
    """
    # More than one character, because U+FFFD may also be what the text says.
    for rest in range(min(_CONTEXT_TOKENS, len(tokens))):
        end = len(tokens) - rest
        for count in range(1, min(_CONTEXT_TOKENS, end + 1)):
            context = list(tokens[end - count : end])
            text = decode(context)
            if text and INCOMPLETE not in text:
                return context, list(tokens[end:])
    last = list(tokens[-_CONTEXT_TOKENS:])
    split = max(len(last) - _CHARACTER_TOKENS + 1, 0)
    return last[:split], last[split:]


def _after(before: str, text: str) -> str:
    """Return a text from the first character that differs from the earlier text."""
    if text.startswith(before):
        return text[len(before) :]
    differs = (
        index for index, pair in enumerate(zip(before, text, strict=False)) if len(set(pair)) > 1
    )
    return text[next(differs, len(text)) :]
