"""Tool calls in a model's text, in Hermes' format, which Qwen 2.5 and 3 use too.

<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>

Arguments are passed on as the model wrote them: an object, or a string that holds one, under
`arguments` or `parameters` (Llama's name); a call with neither has none. A tag may hold several
calls, one after another or in a list. Whatever else it holds stays text as a whole, so no call is
made that the model did not write. White space around calls belongs to the format.
"""

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.answer_rules import HERMES_CALL
from tinkercloud_worker.chat.text import suffix_length

_END = "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_TOKENS = re.compile(rf'\\.|"|{_END}', re.DOTALL)
"""What decides whether the end of a call lies in a string of its JSON."""
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    name: str
    arguments_json: str
    """Its arguments, an object, exactly as the model wrote them."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallParser:
    """Splits a growing text into plain text and calls. Text that only looks like one stays text."""

    def __init__(self) -> None:
        self._held = ""
        """Text that is not certain: white space, then a part of a tag or of a call."""
        self._start = 0
        """Where the content of the held tag begins."""
        self._end: _CallEnd | None = None
        """The search for the end of the call whose tag the held text has; None if it has none."""
        self._follows_call = False

    def add(self, text: str) -> list[str | ToolCall]:
        """Append text; return the parts that are certain."""
        self._held += text
        parts: list[str | ToolCall] = []
        while self._end is not None or HERMES_CALL in self._held:
            if self._end is None:
                parts += self._before(self._held.index(HERMES_CALL))
                self._start = self._held.index(HERMES_CALL) + len(HERMES_CALL)
                self._end = _CallEnd(self._start)
            end = self._end.find(self._held)
            if end is None:
                return parts
            parts += self._taken(end)
        return parts + self._before(len(self._held) - suffix_length(self._held, HERMES_CALL))

    def finish(self) -> list[str | ToolCall]:
        """Return the rest of the text; a call that was not closed is one if it is complete."""
        parts: list[str | ToolCall] = []
        while self._end is not None:
            parts += self._taken(len(self._held))
            parts += self.add("")
        return parts + self._text(len(self._held))

    def _taken(self, end: int) -> list[str | ToolCall]:
        """Remove the held tag, whose content ends there, and return its calls or its text."""
        self._end = None
        if calls := _calls_in(self._held[self._start : end]):
            self._held = self._held[end + len(_END) :]
            self._follows_call = True
            return list(calls)
        # Its end may have been taken for a part of a string that was never closed.
        first_end = self._held.find(_END, self._start)
        return self._text(len(self._held) if first_end < 0 else first_end + len(_END))

    def _before(self, length: int) -> list[str | ToolCall]:
        """Remove text from the beginning of the held text, but for the white space at its end."""
        return self._text(len(self._held[:length].rstrip(_SPACE)))

    def _text(self, length: int) -> list[str | ToolCall]:
        """Remove text from the beginning of the held text; return what is shown of it."""
        text, self._held = self._held[:length], self._held[length:]
        if self._follows_call:
            text = text.lstrip(_SPACE)
            self._follows_call = not text
        return [text] if text else []


class _CallEnd:
    """Searches a growing text for the end of a call that is not within a string of its JSON."""

    def __init__(self, start: int) -> None:
        self._position = start
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """Return where the tag that ends the call begins; None if it is not there yet."""
        for found in _TOKENS.finditer(text, self._position):
            if found[0] == _END and not self._is_in_string:
                return found.start()
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            self._position = found.end()
        # A part of the tag, or a backslash, may be at the end.
        self._position = max(self._position, len(text) - len(_END) + 1)
        return None


def _calls_in(text: str) -> list[ToolCall]:
    """Return the calls that a tag holds; none if a part of it is something else."""
    try:
        return [_call_in(members) for members in _objects_in(text)]
    except (ValueError, RecursionError):
        return []


def _objects_in(text: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the members of each object in a text of objects, or of a list of them.

    Raises:
        ValueError: the text has something else.
    """
    position = _skip(text, 0)
    is_list = text.startswith("[", position)
    if is_list:
        position = _skip(text, position + 1)
    while True:
        members, position = _members(text, position)
        yield members
        position = _skip(text, position)
        if is_list and text.startswith(",", position):
            position = _skip(text, position + 1)
        elif is_list:
            if not text.startswith("]", position) or _skip(text, position + 1) < len(text):
                raise ValueError("not a list of objects")
            return
        elif position == len(text):
            return


def _members(text: str, position: int) -> tuple[list[tuple[str, str]], int]:
    """Return the names and the exact values of the object at a position, and where it ends.

    Raises:
        ValueError: there is no object.
    """
    if not text.startswith("{", position):
        raise ValueError("not an object")
    _, end = DECODER.raw_decode(text, position)
    members: list[tuple[str, str]] = []
    position = _skip(text, position + 1)
    while not text.startswith("}", position):
        name, colon = DECODER.raw_decode(text, position)
        start = _skip(text, _skip(text, colon) + 1)
        _, stop = DECODER.raw_decode(text, start)
        members.append((name, text[start:stop]))
        position = _skip(text, stop)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
    return members, end


def _skip(text: str, position: int) -> int:
    """Return the position of the next character that is no white space."""
    found = _SPACES.match(text, position)
    return found.end() if found else position


def _call_in(members: list[tuple[str, str]]) -> ToolCall:
    """Return the call that an object is.

    Raises:
        ValueError: it is none, or it is not certain which one.
    """
    read = {name: value for name, value in members if name in {"name", *_ARGUMENTS}}
    given = [read[name] for name in _ARGUMENTS if name in read]
    if sum(name in read for name, _ in members) != len(read) or len(given) > 1:
        raise ValueError("a name or arguments more than once")
    name = DECODER.decode(read.get("name", "null"))
    if not isinstance(name, str) or not name or has_half(name):
        raise ValueError("no name")
    return ToolCall(name, _object_in(given[0]) if given else "{}")


def _object_in(value: str) -> str:
    """Return the object that a JSON value is, or that a string holds, as it was written.

    Raises:
        ValueError: there is none.
    """
    content = DECODER.decode(value)
    if isinstance(content, str):
        value = content.strip(_SPACE)
        content = DECODER.decode(value)
    if not isinstance(content, dict) or has_half(value):
        raise ValueError("not an object")
    return value
