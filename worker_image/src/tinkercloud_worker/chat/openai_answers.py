"""Answers of OpenAI's chat completions and completions, whole or as chunks of a stream."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tinkercloud_worker.chat.answer_parts import Part, Thought, ToolCall
from tinkercloud_worker.chat.conversation import Asked, Choice, Counts
from tinkercloud_worker.chat.openai_requests import ChatCompletionRequest, CompletionRequest
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.engine.sampling.sampler_interface import SampledToken

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an echoed prompt, or a sampled one."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[Sequence[int], Sequence[float]] | None
    """The most likely tokens at its position and their logprobs, if they were asked for."""


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.sampled,
        "total_tokens": counts.prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


class _Answer:
    """The head of an answer, which all its chunks repeat."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, asked: Asked, text: ChatText, *, includes_usage: bool) -> None:
        self._text = text
        self._includes_usage = includes_usage
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._parts: dict[int, list[Part]] = {}

    @property
    def id(self) -> str:
        """The id of the answer."""
        return str(self._head["id"])

    def _chunk(self, choices: Sequence[Any], usage: Mapping[str, Any] | None = None) -> bytes:
        content = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._includes_usage:
            content["usage"] = usage
        return _event(content)

    def _whole(self, choices: Sequence[Any], counts: Counts) -> bytes:
        return orjson.dumps(
            {**self._head, "object": self.kind, "choices": choices, "usage": _usage(counts)}
        )

    def end(self, counts: Counts) -> bytes:
        """Return the end of the stream."""
        return (self._chunk([], _usage(counts)) if self._includes_usage else b"") + DONE

    def keep(self, index: int, parts: Sequence[Part]) -> None:
        """Keep parts of a choice for the whole answer."""
        self._parts.setdefault(index, []).extend(parts)

    def keep_prompt(self, index: int, text: str, scored: Sequence[ScoredToken]) -> None:
        """Keep the prompt of a choice for the whole answer; only completions repeat it."""

    def _kept_text(self, index: int) -> str:
        parts = self._parts.get(index, [])
        return "".join(
            part for part in parts if isinstance(part, str) and not isinstance(part, Thought)
        )


def _reason(choice: Choice) -> str:
    if not choice.is_complete:
        return "length"
    return "tool_calls" if choice.has_calls else "stop"


class ChatAnswer(_Answer):
    """The answer of chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest, asked: Asked, text: ChatText) -> None:
        super().__init__(asked, text, includes_usage=request.stream_options.include_usage)
        self._has_logprobs = request.logprobs
        self._num_calls: dict[int, int] = {}

    def begin(self, num_choices: int) -> bytes:
        """Return the beginning of the stream."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._choice(index, delta) for index in range(num_choices))

    def add(
        self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken | ScoredToken]
    ) -> bytes:
        """Return chunks with the newest parts of a choice, and the tokens since the last chunk."""
        deltas = [self._delta(index, part) for part in parts]
        if not deltas and self._has_logprobs and tokens:
            deltas = [{"content": ""}]
        chunks = []
        for position, delta in enumerate(deltas):
            chunks.append(self._choice(index, delta, tokens=tokens if not position else ()))
        return b"".join(chunks)

    def finish(self, index: int, choice: Choice) -> bytes:
        """Return the chunk that says why a choice ended."""
        return self._choice(index, {}, reason=_reason(choice))

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Thought):
            return {"reasoning_content": str(part)}
        if isinstance(part, str):
            return {"content": part}
        number = self._num_calls.get(index, 0)
        self._num_calls[index] = number + 1
        return {"tool_calls": [{"index": number, **_call(part)}]}

    def _choice(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        tokens: Sequence[SampledToken | ScoredToken] = (),
        reason: str | None = None,
    ) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        content = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([content])

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        """Return the whole answer."""
        return self._whole([self._whole_choice(*each) for each in enumerate(choices)], counts)

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        calls = [_call(part) for part in self._parts.get(index, []) if isinstance(part, ToolCall)]
        text = self._kept_text(index)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        thoughts = [part for part in self._parts.get(index, []) if isinstance(part, Thought)]
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message.update(content=text or None, tool_calls=calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.shown),
            "finish_reason": _reason(choice),
        }

    def _logprobs(self, tokens: Sequence[SampledToken | ScoredToken]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        content = []
        for token in tokens:
            ids, logprobs = token.top or ((), ())
            top = [self._entry(*pair) for pair in zip(ids, logprobs, strict=True)]
            content.append({**self._entry(token.token, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name, encoded = self._text.name(token), self._text.bytes_of(token)
        if encoded is None and "\ufffd" not in name:
            encoded = name.encode()
        return {
            "token": name,
            "logprob": logprob,
            "bytes": None if encoded is None else list(encoded),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


class CompletionAnswer(_Answer):
    """The answer of completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, asked: Asked, text: ChatText) -> None:
        super().__init__(asked, text, includes_usage=request.stream_options.include_usage)
        self._has_logprobs = request.logprobs is not None
        self._offsets: dict[int, int] = {}
        self._echoed: dict[int, Sequence[ScoredToken]] = {}

    def begin(self, num_choices: int) -> bytes:
        """Return the beginning of the stream, which is empty."""
        del num_choices
        return b""

    def keep_prompt(self, index: int, text: str, scored: Sequence[ScoredToken]) -> None:
        """Keep the prompt of a choice, and its tokens if they were scored."""
        self.keep(index, [text])
        self._echoed[index] = scored
        # SentencePiece decodes a text without the space that it puts before the first word.
        given = b"".join(self._encoded(each.token) for each in scored)
        self._offsets[index] = min(_num_spaces(text.encode()) - _num_spaces(given), 0)

    def add(
        self, index: int, parts: Sequence[Part], tokens: Sequence[SampledToken | ScoredToken]
    ) -> bytes:
        """Return a chunk with the newest text of a choice, and the tokens since the last chunk."""
        text = "".join(part for part in parts if isinstance(part, str))
        if not text and not (self._has_logprobs and tokens):
            return b""
        return self._chunk([self._choice(index, text, tokens, None)])

    def finish(self, index: int, choice: Choice) -> bytes:
        """Return the chunk that says why a choice ended."""
        return self._chunk(
            [self._choice(index, "", self._unlisted(index, choice), _reason(choice))]
        )

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        """Return the whole answer."""
        contents = []
        for index, choice in enumerate(choices):
            tokens: list[SampledToken | ScoredToken] = list(self._echoed.get(index, ()))
            tokens += [*choice.shown, *self._unlisted(index, choice)]
            content = self._choice(index, self._kept_text(index), tokens, _reason(choice))
            contents.append(content)
        return self._whole(contents, counts)

    def _unlisted(self, index: int, choice: Choice) -> Sequence[SampledToken]:
        """Return the token that ended a choice, if it is listed: after an echoed prompt.

        Evaluations cut the sampled token off by its number.
        """
        return choice.tokens[len(choice.shown) :] if index in self._echoed else ()

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[SampledToken | ScoredToken],
        reason: str | None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if tokens and self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[SampledToken | ScoredToken]) -> dict[str, Any]:
        names, tops, offsets = [], [], []
        for token in tokens:
            names.append(self._name(token.token))
            offsets.append(self._offset(index, token.token))
            tops.append(self._likeliest(token))
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _likeliest(self, token: SampledToken | ScoredToken) -> dict[str, float] | None:
        """Return the most likely tokens at a position, and its own; None where nothing is scored.

        Of several tokens with the same text, the likeliest.
        """
        if token.logprob is None:
            return None
        ids, logprobs = token.top or ((), ())
        pairs = zip(map(self._name, ids), logprobs, strict=True)
        return {self._name(token.token): token.logprob} | dict(reversed(list(pairs)))

    def _name(self, token: int) -> str:
        """Return the text of a token; that of a part of a character names its bytes."""
        name, encoded = self._text.name(token), self._text.bytes_of(token)
        if "\ufffd" not in name or encoded is None:
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)

    def _offset(self, index: int, token: int) -> int:
        """Return where a token of a choice begins, in characters of the text.

        The parts of a character begin with it. Special tokens have no text.
        """
        offset, encoded = self._offsets.get(index, 0), self._encoded(token)
        continues = encoded[:1] and encoded[0] & 0xC0 == 0x80
        self._offsets[index] = offset + sum(byte & 0xC0 != 0x80 for byte in encoded)
        return max(offset - 1 if continues else offset, 0)

    def _encoded(self, token: int) -> bytes:
        """Return what a token adds to the bytes of the text."""
        if token in self._text.hidden:
            return b""
        encoded = self._text.bytes_of(token)
        return self._text.name(token).encode() if encoded is None else encoded


def _num_spaces(encoded: bytes) -> int:
    """Return with how many spaces a text begins."""
    return len(encoded) - len(encoded.lstrip(b" "))
