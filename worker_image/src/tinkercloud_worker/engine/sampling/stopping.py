"""Where stop rules end a sequence: one definition for all samplers.

A sequence ends with the token that completes a stop string in its text (`growing_text`), or with a
stop token. Special tokens are part of the text.
"""

from collections.abc import Sequence
from dataclasses import replace

from tinkercloud_protocol.requests.tensors import SampledSequence, TopLogprobs
from tinkercloud_worker.engine.sampling.growing_text import (
    INCOMPLETE,
    Decode,
    GrowingText,
    split_at_character,
)
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest


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
        self._growing = GrowingText(decode, prompt)
        self._kept_characters = max(map(len, strings)) - 1
        self._text = ""
        """End of the certain text of the sequence."""

    def completes(self, token: int) -> bool:
        """Append a token; return whether the text now contains a stop string."""
        text = self._text + self._growing.add(token)
        self._text = text[-self._kept_characters :] if self._kept_characters else ""
        return any(string in text + self._growing.pending for string in self._strings)


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
    context, started = split_at_character(request.prompt.tolist(), decode)
    text = decode([*context, *started, *tokens])
    return INCOMPLETE in text or any(string in text for string in request.stop.strings)
