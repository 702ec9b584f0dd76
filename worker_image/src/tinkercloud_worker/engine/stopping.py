"""Where stop rules end a sequence: one definition for all samplers.

A sequence ends with the token that completes a stop string in its text, or with a stop token. Its
text is what its tokens add to the text of the prompt: a tokenizer that drops the space before the
first word of a text keeps the one between prompt and sample. Special tokens are part of the text.

A character that takes several tokens is complete with its last token. For each new token, only the
tokens since the last complete character are decoded, after the tokens of that character, which some
decoders need as context. So the cost per token does not depend on the length of the sequence and
its stop strings.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.tensors import SampledSequence, TopLogprobs
from tinkercloud_worker.engine.sampler import SamplingRequest

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""

_INCOMPLETE = "\ufffd"
"""Decoded text of bytes that do not form a (complete) character."""
_CHARACTER_TOKENS = 4
"""Maximum number of tokens of one character, which has at most four bytes in UTF-8."""
_CONTEXT_TOKENS = 2 * _CHARACTER_TOKENS
_MAX_WINDOW_TOKENS = 64
"""Number of tokens without text after which their context is dropped anyway."""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return an exact decoder of a tokenizer, which keeps special tokens and all spaces."""

    def decode(tokens: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return decode


class StopStringSearch:
    """Searches the text of one sequence for stop strings, token by token."""

    def __init__(self, strings: Sequence[str], decode: Decode, prompt: Sequence[int]) -> None:
        """Start before the first token.

        Args:
            strings: non-empty stop strings, at least one.
            decode: the decoder of the model's tokenizer.
            prompt: token ids before the sequence, at least one.
        """
        self._strings = strings
        self._decode = decode
        self._kept_characters = max(map(len, strings)) - 1
        self._window = _context(prompt, decode)
        self._num_settled = len(self._window)
        """Number of tokens of the window whose text is in `_text` or in the prompt."""
        self._settled = decode(self._window).rstrip(_INCOMPLETE)
        """Text of those tokens, without an incomplete character at the end."""
        self._text = ""
        """End of the settled text of the sequence."""

    def completes(self, token: int) -> bool:
        """Append a token; return whether the text now contains a stop string."""
        self._window.append(token)
        window_text = self._decode(self._window)
        text = self._text + _after(self._settled, window_text)
        if any(string in text for string in self._strings):
            return True
        is_complete = not window_text.endswith(_INCOMPLETE)
        if is_complete or len(self._window) - self._num_settled > _CONTEXT_TOKENS:
            self._settle(text.rstrip(_INCOMPLETE), window_text)
        return False

    def _settle(self, text: str, window_text: str) -> None:
        self._text = text[-self._kept_characters :] if self._kept_characters else ""
        newest = self._window[self._num_settled :]
        newest_text = self._decode(newest)
        if newest_text or len(self._window) > _MAX_WINDOW_TOKENS:
            self._window, window_text = newest, newest_text
        # Otherwise decoders would treat the next token as the first one of a text.
        self._num_settled = len(self._window)
        self._settled = window_text.rstrip(_INCOMPLETE)


def cut_at_stop(
    sequence: SampledSequence, request: SamplingRequest, decode: Decode
) -> SampledSequence:
    """Truncate a sequence after the token with which the request's stop rules end it.

    This is for samplers that detect stops themselves and may miss one. A sequence that ended in
    time is returned unchanged.
    """
    candidates = sequence.tokens[:-1] if sequence.stopped else sequence.tokens
    count = _stopped_after(candidates, request, decode)
    if count is None:
        return sequence
    top = sequence.top
    return replace(
        sequence,
        tokens=sequence.tokens[:count],
        logprobs=sequence.logprobs[:count],
        stopped=True,
        top=TopLogprobs(top.token_ids[:count], top.logprobs[:count]) if top else None,
    )


def _stopped_after(tokens: Sequence[int], request: SamplingRequest, decode: Decode) -> int | None:
    """Return the number of tokens after which stop rules end a sequence; None if they don't."""
    stop = request.stop
    ids = (index for index, token in enumerate(tokens, 1) if token in stop.token_ids)
    end = next(ids, None)
    if not stop.strings or not _may_contain(tokens[:end], request, decode):
        return end
    search = StopStringSearch(stop.strings, decode, request.prompt.tolist())
    found = (index for index, token in enumerate(tokens[:end], 1) if search.completes(token))
    return next(found, end)


def _may_contain(tokens: Sequence[int], request: SamplingRequest, decode: Decode) -> bool:
    """Return whether the text may contain a stop string; false positives are possible."""
    text = decode([*_context(request.prompt.tolist(), decode), *tokens])
    return _INCOMPLETE in text or any(string in text for string in request.stop.strings)


def _after(before: str, text: str) -> str:
    """Return a text from the first character that differs from the earlier text."""
    if text.startswith(before):
        return text[len(before) :]
    # Some decoders decode bytes differently when others follow.
    differs = (
        index for index, pair in enumerate(zip(before, text, strict=False)) if len(set(pair)) > 1
    )
    return text[next(differs, len(text)) :]


def _context(prompt: Sequence[int], decode: Decode) -> list[int]:
    """Return the last tokens of a prompt, starting at the beginning of a character."""
    for count in range(1, _CONTEXT_TOKENS):
        tail = list(prompt[-count:])
        text = decode(tail)
        if text and _INCOMPLETE not in text:
            return tail
    return list(prompt[-_CONTEXT_TOKENS:])
