"""Tool calls of Llama 3 and 4: JSON that is the whole answer.

{"name": "f", "parameters": {...}}

It may follow `<|python_tag|>`, and several calls follow one another, with or without `;`. Without
the mark, a call must be of an offered tool, and have its arguments and no members of its own: other
JSON is an answer.
"""

import json
from collections.abc import Collection, Sequence

from tinkercloud_worker.chat.answer_parts import Part, ToolCall, suffix_length
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.rules.lark import HEADER, TEXT, json_rule, literal
from tinkercloud_worker.chat.tool_formats.call_reader import json_rules, thought, thought_rules
from tinkercloud_worker.chat.tool_formats.json_calls import (
    ARGUMENTS,
    SPACE,
    Members,
    call_in,
    members_at,
    skip,
)
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat

_TAG = "<|python_tag|>"


class Llama(ToolFormat):
    """See the module."""

    name = "Llama"
    marks = (_TAG,)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return all(each in template for each in ("ipython", '{"name": ', '"parameters": '))

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader; see `ToolFormat`."""
        return _Reader({function.name for function in offered}) if offered else None

    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule; see `ToolFormat`. Its templates have one call a turn."""
        forms = [f"call_{number}" for number in range(len(rule.functions))]
        rules = []
        for number, function in enumerate(rule.functions):
            name = json.dumps(function.name, ensure_ascii=False)
            begin = literal(f'{{"name": {name}, "parameters": ')
            rules.append(f'call_{number}: begin_{number} json_{number} "}}"')
            # Lazy, so that it ends free text.
            rules.append(f"begin_{number}[lazy]: {literal(_TAG)}? {begin}")
            rules.append(json_rule(f"json_{number}", function.schema))
        if rule.json_schema is not None:
            forms.append("json")
        if rule.has_text:
            forms.append("TEXT")
            rules.append(TEXT)
        start = f"start: {thought(rule, reasoning)}({' | '.join(forms)})"
        return "\n".join(
            [HEADER, start, *thought_rules(rule, reasoning), *rules, *json_rules(rule)]
        )


class _Reader:
    """See `CallReader`. Whether an answer in JSON is a call, its end says."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        """Those of the offered tools."""
        self._held = ""
        """Text that may be a part of a mark."""
        self._spaces: list[str] = []
        """White space before the held text. Calls that follow remove it."""
        self._has_shown = False
        self._waiting: list[str] | None = None
        """All further text, if it may be calls."""

    def add(self, text: str) -> list[Part]:
        """Append text; return the parts that are certain."""
        if self._waiting is not None:
            self._waiting.append(text)
            return []
        self._held += text
        tag = self._held.find(_TAG)
        begin = tag if tag >= 0 else len(self._held) - suffix_length(self._held, _TAG)
        if not self._has_shown and self._held.lstrip(SPACE).startswith("{"):
            tag = begin = len(self._held) - len(self._held.lstrip(SPACE))
        parts = self._text(self._held[:begin])
        self._held = self._held[begin:]
        if tag >= 0:
            self._waiting, self._held = [self._held], ""
        return parts

    def finish(self) -> list[Part]:
        """Return the rest of the text, or the calls that it is."""
        waiting = "".join(self._waiting or [])
        is_marked = waiting.startswith(_TAG)
        if calls := _calls_in(waiting.removeprefix(_TAG), None if is_marked else self._names):
            return list(calls)
        rest = "".join([*self._spaces, waiting, self._held])
        return [rest] if rest else []

    def _text(self, text: str) -> list[Part]:
        """Return what is shown of a text; the white space at its end waits for what follows."""
        content = text.rstrip(SPACE)
        shown = "".join([*self._spaces, content]) if content else ""
        if content:
            self._has_shown, self._spaces = True, []
        self._spaces.append(text[len(content) :])
        return [shown] if shown else []


def _calls_in(text: str, names: Collection[str] | None) -> list[ToolCall]:
    """Return the calls that a text consists of; none if a part of it is something else.

    Args:
        text: the text.
        names: the tools that it may call; None for any, and for objects with further members.
    """
    calls = []
    position = skip(text, 0)
    try:
        while position < len(text):
            members, position = members_at(text, position)
            if not any(name in ARGUMENTS for name, _ in members):
                return []
            calls.append(call_in(members))
            if names is not None and not (calls[-1].name in names and _is_plain(members)):
                return []
            position = skip(text, position)
            if text.startswith(";", position):
                position = skip(text, position + 1)
    except (ValueError, RecursionError):
        return []
    return calls


def _is_plain(members: Members) -> bool:
    """Return whether an object has nothing but a call, of which models also write the type."""
    return all(
        name in {"name", *ARGUMENTS} or (name, value) == ("type", '"function"')
        for name, value in members
    )
