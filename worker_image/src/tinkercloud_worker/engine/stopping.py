"""Where stop rules end a sequence: one definition for every sampler.

A sequence ends with the token that completes a stop string in its text, or with a stop token. Its
text is what its tokens add to the prompt's text: a tokenizer that drops the space before the first
word of a text keeps the one between prompt and sample. Special tokens are part of the text.

Characters of several tokens exist once their last token is drawn. Only the tokens since the last
complete character are decoded for each new one, after those that complete it, whose context some
decoders need; so a token costs the same however long the sequence and its stop strings are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.tensors import SampledSequence, TopLogprobs
from tinkercloud_worker.engine.sampler import SamplingRequest

Decode = Callable[[Sequence[int]], str]
"""From token ids to their text."""

_INCOMPLETE = "\ufffd"
"""The text of bytes that are no character, or not yet."""
_CHARACTER_TOKENS = 4
"""Tokens of one character at most: it has no more bytes in UTF-8."""
_CONTEXT_TOKENS = 2 * _CHARACTER_TOKENS
_MAX_WINDOW_TOKENS = 64
"""Tokens without any text, after which their context is dropped all the same."""


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return what decodes a tokenizer's tokens exactly: special tokens and all spaces included."""

    def decode(tokens: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return decode


class StopStringSearch:
    """Looks for stop strings in the text of one sequence while it grows by a token at a time."""

    def __init__(self, strings: Sequence[str], decode: Decode, prompt: Sequence[int]) -> None:
        """Start before the first token.

        Args:
            strings: the stop strings, at least one, none empty.
            decode: of the model's tokenizer.
            prompt: token ids before the sequence, at least one.
        """
        self._strings = strings
        self._decode = decode
        self._kept_characters = max(map(len, strings)) - 1
        self._window = _context(prompt, decode)
        self._num_settled = len(self._window)
        """Tokens of the window whose text is in `_text`, or is the prompt's."""
        self._settled = decode(self._window).rstrip(_INCOMPLETE)
        """The text of those tokens, without an incomplete character at its end."""
        self._text = ""
        """The end of the sequence's settled text."""

    def completes(self, token: int) -> bool:
        """Append a token; return whether the sequence's text now contains a stop string."""
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
        # Else decoders would take the next token for the first one of a text.
        self._num_settled = len(self._window)
        self._settled = window_text.rstrip(_INCOMPLETE)


def cut_at_stop(
    sequence: SampledSequence, request: SamplingRequest, decode: Decode
) -> SampledSequence:
    """Return a sequence up to the token with which the request's stop rules end it.

    For samplers that look for stops by themselves, and may overlook one. A sequence that they ended
    in time is returned as it is.
    """
    overlooked = sequence.tokens[:-1] if sequence.stopped else sequence.tokens
    count = _stopped_after(overlooked, request, decode)
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
    """Return after how many tokens stop rules end a sequence; None if they don't."""
    stop = request.stop
    ids = (index for index, token in enumerate(tokens, 1) if token in stop.token_ids)
    end = next(ids, None)
    if not stop.strings or not _may_contain(tokens[:end], request, decode):
        return end
    search = StopStringSearch(stop.strings, decode, request.prompt.tolist())
    found = (index for index, token in enumerate(tokens[:end], 1) if search.completes(token))
    return next(found, end)


def _may_contain(tokens: Sequence[int], request: SamplingRequest, decode: Decode) -> bool:
    """Whether a stop string may be in a sequence's text; wrong only where there is none."""
    text = decode([*_context(request.prompt.tolist(), decode), *tokens])
    return _INCOMPLETE in text or any(string in text for string in request.stop.strings)


def _after(before: str, text: str) -> str:
    """Return a text from the first character on in which it differs from the text before."""
    if text.startswith(before):
        return text[len(before) :]
    # Some decoders show bytes otherwise once others follow.
    differs = (
        index for index, pair in enumerate(zip(before, text, strict=False)) if len(set(pair)) > 1
    )
    return text[next(differs, len(text)) :]


def _context(prompt: Sequence[int], decode: Decode) -> list[int]:
    """Return the end of a prompt, from the beginning of a character."""
    for count in range(1, _CONTEXT_TOKENS):
        tail = list(prompt[-count:])
        text = decode(tail)
        if text and _INCOMPLETE not in text:
            return tail
    return list(prompt[-_CONTEXT_TOKENS:])
