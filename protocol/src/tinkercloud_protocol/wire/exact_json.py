"""JSON whose numbers keep their digits: what a model reads and writes is not rounded on the way.

Integers have any size. A number that Python would write in another way, such as 1e400, 0.10 or an
integer of five thousand digits, is read as an `ExactNumber`.
"""

import json
import re
from typing import Any, NoReturn

from tinkercloud_protocol.wire.errors import InvalidRequest

_MAX_DIGITS = 4000
"""Python converts longer integers only if its limit for them is raised."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can escape, but UTF-8 can't encode."""


class ExactNumber(float):
    """A number with its digits. Its value as a float may be rounded or infinite."""

    __slots__ = ("literal",)

    literal: str
    """The number as it was written."""

    def __new__(cls, literal: str) -> "ExactNumber":
        """Read a number of JSON."""
        number = super().__new__(cls, literal)
        number.literal = literal
        return number


def _integer(literal: str) -> int | ExactNumber:
    if len(literal) > _MAX_DIGITS or literal == "-0":
        return ExactNumber(literal)
    return int(literal)


def _decimal(literal: str) -> float:
    value = float(literal)
    return value if repr(value) == literal else ExactNumber(literal)


def _no_number(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a number of JSON")


DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_decimal, parse_constant=_no_number, strict=True
)
"""Reads JSON as defined by RFC 8259. Its errors are ValueError, or RecursionError."""


def read(text: str) -> Any:  # noqa: ANN401 - what the JSON holds
    """Read a JSON text, in which strings may have halves of surrogate pairs.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_body(body: bytes) -> Any:  # noqa: ANN401 - what the JSON holds
    """Read the JSON body of a request, whose strings can be encoded in UTF-8.

    Raises:
        InvalidRequest: the body is something else.
    """
    try:
        content = read(body.decode())
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if b"\\u" in body and has_half(content):
        raise InvalidRequest("the request body is not valid JSON: it has half a surrogate pair")
    return content


def has_half(content: object) -> bool:
    """Return whether a string in a JSON value has half of a surrogate pair."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and SURROGATE.search(value):
            return True
    return False
