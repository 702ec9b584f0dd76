"""Parts of an answer: calls and reasoning. Other text is a plain string."""

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    name: str
    arguments_json: str
    """Its arguments, an object, exactly as the model wrote them if the format is JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class Thought(str):
    """A part of the reasoning before an answer, without its marks."""

    __slots__ = ()


Part = str | ToolCall


def suffix_length(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that `mark` begins with, but is longer."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
