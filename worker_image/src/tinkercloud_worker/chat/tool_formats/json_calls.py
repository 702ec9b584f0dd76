"""Calls as JSON objects with a name and arguments, which several formats have.

Arguments are passed on as the model wrote them: an object, or a string that holds one, under
`arguments` or `parameters` (Llama's name).
"""

import re
from collections.abc import Iterator

from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.answer_parts import ToolCall

Members = list[tuple[str, str]]
"""The names of an object's members, and their values as they were written."""
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")
_BRACKETS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class MarkOutsideStrings:
    """Searches a growing text for a mark that is not within a string of JSON."""

    def __init__(self, start: int, mark: re.Pattern[str], longest: int) -> None:
        """Start the search.

        Args:
            start: where it begins.
            mark: the mark.
            longest: the length of the longest mark, in characters.
        """
        self._position = start
        self._tokens = re.compile(rf'\\.|"|{mark.pattern}', re.DOTALL)
        self._longest = longest
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """Return where the mark begins; None if it is not there yet."""
        for found in self._tokens.finditer(text, self._position):
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string and not found[0].startswith("\\"):
                return found.start()
            self._position = found.end()
        # A part of a mark, or a backslash, may be at the end.
        self._position = max(self._position, len(text) - self._longest + 1)
        return None


class JsonEnd:
    """Searches a growing text for the end of the first JSON value that begins with a bracket."""

    def __init__(self, start: int, bracket: str) -> None:
        """Start the search.

        Args:
            start: where it begins.
            bracket: the bracket, `[` or `{`; text before it is skipped.
        """
        self._position = start
        self._bracket = bracket
        self._depth = 0
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """Return where the value ends; None if it is not there yet."""
        if not self._depth:
            begin = text.find(self._bracket, self._position)
            self._position = len(text) if begin < 0 else begin
        for found in _BRACKETS.finditer(text, self._position):
            self._position = found.end()
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string and found[0] in "[]{}":
                self._depth += 1 if found[0] in "[{" else -1
                if not self._depth:
                    return self._position
        # A backslash at the end belongs to what follows.
        is_escape = self._position < len(text) and text.endswith("\\")
        self._position = len(text) - is_escape
        return None


def calls_in(text: str) -> list[ToolCall]:
    """Return the calls that a tag holds; none if a part of it is something else."""
    try:
        return [call_in(members) for members in objects_in(text)]
    except (ValueError, RecursionError):
        return []


def objects_in(text: str) -> Iterator[Members]:
    """Yield the members of each object in a text of objects, or of a list of them.

    Raises:
        ValueError: the text has something else.
    """
    position = skip(text, 0)
    is_list = text.startswith("[", position)
    if is_list:
        position = skip(text, position + 1)
    while True:
        members, position = members_at(text, position)
        yield members
        position = skip(text, position)
        if is_list and text.startswith(",", position):
            position = skip(text, position + 1)
        elif is_list:
            if not text.startswith("]", position) or skip(text, position + 1) < len(text):
                raise ValueError("not a list of objects")
            return
        elif position == len(text):
            return


def members_at(text: str, position: int) -> tuple[Members, int]:
    """Return the names and the exact values of the object at a position, and where it ends.

    Raises:
        ValueError: there is no object.
    """
    if not text.startswith("{", position):
        raise ValueError("not an object")
    _, end = DECODER.raw_decode(text, position)
    members: Members = []
    position = skip(text, position + 1)
    while not text.startswith("}", position):
        name, colon = DECODER.raw_decode(text, position)
        start = skip(text, skip(text, colon) + 1)
        _, stop = DECODER.raw_decode(text, start)
        members.append((name, text[start:stop]))
        position = skip(text, stop)
        if text.startswith(",", position):
            position = skip(text, position + 1)
    return members, end


def skip(text: str, position: int) -> int:
    """Return the position of the next character that is no white space."""
    found = _SPACES.match(text, position)
    return found.end() if found else position


def call_in(members: Members) -> ToolCall:
    """Return the call that an object is.

    Raises:
        ValueError: it is none, or it is not certain which one.
    """
    read = {name: value for name, value in members if name in {"name", *ARGUMENTS}}
    given = [read[name] for name in ARGUMENTS if name in read]
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
        value = content.strip(SPACE)
        content = DECODER.decode(value)
    if not isinstance(content, dict) or has_half(value):
        raise ValueError("not an object")
    return value
