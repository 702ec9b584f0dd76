"""Tool calls in a model's text, in Hermes' format, which Qwen 2.5 and 3 use too.

<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>
"""

import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinkercloud_worker.chat.text import HERMES_CALL, suffix_length

_END = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        return orjson.dumps(self.arguments).decode()


class ToolCallParser:
    """Splits a growing text into plain text and calls. Text that only looks like one stays text."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[str | ToolCall]:
        """Append text; return the parts that are certain."""
        self._held += text
        parts: list[str | ToolCall] = []
        while True:
            start = self._held.find(HERMES_CALL)
            if start < 0:
                split = len(self._held) - suffix_length(self._held, HERMES_CALL)
                parts.append(self._held[:split])
                self._held = self._held[split:]
                break
            parts.append(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(_END)
            if end < 0:
                break
            parts.append(
                _call_in(self._held[len(HERMES_CALL) : end]) or self._held[: end + len(_END)]
            )
            self._held = self._held[end + len(_END) :]
        return [part for part in parts if part]

    def finish(self) -> list[str | ToolCall]:
        """Return the rest of the text; a call that was not closed is one if it is complete."""
        rest, self._held = self._held, ""
        call = _call_in(rest.removeprefix(HERMES_CALL)) if rest.startswith(HERMES_CALL) else None
        return [part for part in [call or rest] if part]


def _call_in(text: str) -> ToolCall | None:
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", {})
    return ToolCall(content["name"], arguments) if isinstance(arguments, dict) else None
