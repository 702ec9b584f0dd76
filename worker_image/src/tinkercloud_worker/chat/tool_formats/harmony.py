"""The channels of gpt-oss (OpenAI's Harmony format), with its tool calls.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>answer<|return|>

The recipient may also come before the channel. Commentary without a recipient is for the user, as
the final channel is. A message for another recipient, or with arguments that are no object, stays
text with its marks.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.answer_parts import Part, Thought, ToolCall, suffix_length
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.rules.lark import HEADER, TEXT, json_rule, literal
from tinkercloud_worker.chat.tool_formats.call_reader import json_rules
from tinkercloud_worker.chat.tool_formats.json_calls import SPACE, MarkOutsideStrings
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_BEGIN = re.compile(r"<\|start\|>|<\|channel\|>")
_BODY_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_LONGEST = len(_CHANNEL)
_RECIPIENT_FIRST = " to="
"""How an answer begins whose recipient comes before the channel."""
_FUNCTION = "functions."
_HEADER = re.compile(
    r"(?:<\|start\|>\s*assistant)?(?:\s*to=(?P<first>[^\s<]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>analysis|commentary|final)"
    r"(?:\s*to=(?P<second>[^\s<]+))?(?:(?:\s*<\|constrain\|>\s*|\s+)\w+)?\s*<\|message\|>"
)
_MAX_HEADER = 1024
"""Maximum length of a header, in characters; a longer one is text."""
_PIECE = 4096
"""Characters of an answer that are read at a time, since what was read is cut off."""
_CALL_BEGIN = f"{_CHANNEL}commentary to={_FUNCTION}"
_ANALYSIS = (
    r"ANALYSIS: (/(.|\n)*/ & ~/(.|\n)*<\|(start|channel|end|call|return)\|>(.|\n)*/) "
    + literal(f"<|end|>{_START}assistant")
)
"""Reasoning, and the beginning of the next message."""
_JSON_BEGIN = f" <|constrain|>json{_MESSAGE}"


class Harmony(ToolFormat):
    """See the module."""

    name = "Harmony"
    marks = (_CHANNEL, _MESSAGE, _START, "<|end|>", "<|constrain|>")

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return all(each in template for each in (_CHANNEL, _MESSAGE, _START, _FUNCTION))

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader; see `ToolFormat`. Without tools, it reads the channels."""
        return _Reader(_calls if offered else _no_calls)

    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule; see `ToolFormat`. A turn ends with its first call."""
        numbers = range(len(rule.functions))
        calls = f"({' | '.join(f'call_{number}' for number in numbers)})"
        forms, rules = [], [TEXT]
        if rule.has_text:
            forms.append(f"TEXT | tag {calls}")
            rules.append(f"tag[lazy]: TEXT {literal(_CALL_BEGIN)}")
        elif rule.functions:
            forms.append(f"{literal(_CALL_BEGIN)} {calls}")
        if rule.json_schema is not None:
            is_turn = reasoning is not Reasoning.NONE
            forms.append(f"{literal(f'{_CHANNEL}final{_MESSAGE}')} json" if is_turn else "json")
        for number, function in enumerate(rule.functions):
            begin = literal(_plain_name(function) + _JSON_BEGIN)
            rules.append(f"call_{number}: {begin} json_{number}")
            rules.append(json_rule(f"json_{number}", function.schema))
        before = ""
        if not rule.has_text and reasoning is not Reasoning.NONE:
            before = f"({literal(f'{_CHANNEL}analysis{_MESSAGE}')} ANALYSIS)? "
            rules.append(_ANALYSIS)
        start = f"start: {before}({' | '.join(forms)})"
        return "\n".join([HEADER, start, *rules, *json_rules(rule)])

    def history(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages; reasoning is removed from those with both text and calls.

        The templates refuse such reasoning.
        """
        return [_without_excess(message) for message in messages]


def _without_excess(message: dict[str, Any]) -> dict[str, Any]:
    has_both = bool(message.get("content")) and "tool_calls" in message
    dropped = {"reasoning_content"} if has_both else set()
    return {name: value for name, value in message.items() if name not in dropped}


def _plain_name(function: Function) -> str:
    if not re.fullmatch(r"[^\s<]+", function.name):
        raise InvalidRequest(
            f"{function.field}: the tool call format of this model has no place for the name"
            f" {function.name!r}; send one without spaces and '<'"
        )
    return function.name


def _no_calls(name: str, body: str) -> list[ToolCall]:
    """Return no call."""
    del name, body
    return []


def _calls(name: str, body: str) -> list[ToolCall]:
    """Return the call that a message is; none if its body is no JSON object."""
    arguments = body.strip(SPACE)
    try:
        is_object = isinstance(DECODER.decode(arguments), dict) and not has_half(arguments)
    except (ValueError, RecursionError):
        return []
    return [ToolCall(name, arguments)] if is_object else []


class _Reader:
    """See `CallReader`. The text consists of messages, and of text between them."""

    def __init__(self, calls: Callable[[str, str], list[ToolCall]]) -> None:
        self._calls = calls
        self._held = ""
        """Text that is not certain."""
        self._unread = ""
        """Text after the held one."""
        self._step: Callable[[], list[Part] | None] = self._first
        """Takes the next parts from the held text; None if more text is needed."""
        self._header = ""
        """That of a message that may be a call, as it was written."""
        self._name = ""
        self._end = MarkOutsideStrings(0, _BODY_END, _LONGEST)
        self._shown: Callable[[str], str] = str
        """The kind of text that the body of a message is."""

    def add(self, text: str) -> list[Part]:
        """Append text; return the parts that are certain."""
        self._unread = text
        parts: list[Part] = []
        position = 0
        while position < len(self._unread):
            self._held += self._unread[position : position + _PIECE]
            position += _PIECE
            while (taken := self._step()) is not None:
                parts += taken
                if len(self._held) > 2 * _PIECE and self._step != self._arguments:
                    self._unread = self._held + self._unread[position:]
                    self._held, position = "", 0
                    break
        return parts

    def finish(self) -> list[Part]:
        """Return the rest of the text, or the call that it is."""
        parts: list[Part] = []
        while self._step == self._arguments:
            if calls := self._calls_of(self._held):
                return [*parts, *calls]
            parts += self._not_called(len(self._held))
            parts += self.add(self._taken_back())
        return [*parts, *self._rest()]

    def _taken_back(self) -> str:
        """Remove the held text, and return it."""
        held, self._held = self._held, ""
        return held

    def _rest(self) -> list[Part]:
        raw, self._header = self._header + self._held, ""
        kind = self._shown if self._step == self._body else str
        return [kind(raw)] if raw else []

    def _first(self) -> list[Part] | None:
        if self._held.startswith(_RECIPIENT_FIRST):
            self._step = self._read_header
        elif not _RECIPIENT_FIRST.startswith(self._held):
            self._step = self._between
        else:
            return None
        return []

    def _between(self) -> list[Part] | None:
        found = _HEADER_BEGIN.search(self._held)
        if found is not None and not found.start():
            self._step = self._read_header
            return []
        return self._text(self._certain() if found is None else found.start(), str)

    def _read_header(self) -> list[Part] | None:
        end = self._held.find(_MESSAGE, 0, _MAX_HEADER)
        next_start = self._held.find(_START, 1, _MAX_HEADER)
        if end < 0 and next_start < 0:
            if len(self._held) < _MAX_HEADER:
                return None
            self._step = self._between
            return self._text(1, str)
        if next_start >= 0 and (end < 0 or next_start < end):
            self._step = self._between
            return self._text(next_start, str)
        length = end + len(_MESSAGE)
        # Runs of white space would make the search slow.
        found = _HEADER.fullmatch(" ".join(self._held[:length].split()))
        if found is None:
            self._step = self._between
            return self._text(length, str)
        header, self._held = self._held[:length], self._held[length:]
        recipient = found["first"] or found["second"]
        if recipient is None:
            self._shown = Thought if found["channel"] == "analysis" else str
            self._step = self._body
            return []
        self._header, self._step = header, self._arguments
        self._name = recipient.removeprefix(_FUNCTION) if recipient.startswith(_FUNCTION) else ""
        self._end = MarkOutsideStrings(0, _BODY_END, _LONGEST)
        return []

    def _body(self) -> list[Part] | None:
        found = _BODY_END.search(self._held)
        if found is None:
            return self._text(self._certain(), self._shown)
        parts = self._text(found.start(), self._shown) or []
        self._held = self._held.removeprefix(self._message_end(0))
        self._step = self._between
        return parts

    def _arguments(self) -> list[Part] | None:
        end = self._end.find(self._held)
        if end is None:
            return None
        calls = self._calls_of(self._held[:end])
        if not calls:
            return self._not_called(end)
        self._held, self._header = self._held[end + len(self._message_end(end)) :], ""
        self._step = self._between
        return calls

    def _not_called(self, end: int) -> list[Part]:
        """Return a message that is no call as it was written.

        It ends with the first mark: quotes may have hidden it.
        """
        found = _BODY_END.search(self._held, 0, end)
        end = found.start() if found else end
        after = end + len(self._message_end(end))
        raw, self._header = self._header + self._held[:after], ""
        self._held, self._step = self._held[after:], self._between
        return [raw]

    def _calls_of(self, body: str) -> list[Part]:
        return [*self._calls(self._name, body)] if self._name else []

    def _message_end(self, position: int) -> str:
        """Return the mark there if it ends a message, and does not begin the next one."""
        return next((each for each in _ENDS if self._held.startswith(each, position)), "")

    def _certain(self) -> int:
        """Return the length of the held text without a part of a mark at its end."""
        marks = (_START, _CHANNEL, *_ENDS)
        return len(self._held) - max(suffix_length(self._held, each) for each in marks)

    def _text(self, length: int, kind: Callable[[str], str]) -> list[Part] | None:
        """Remove text from the beginning of the held text; None if there is none to remove."""
        text, self._held = self._held[:length], self._held[length:]
        return [kind(text)] if text else None
