"""What formats share in which a mark begins a call: their reader and their grammar."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkercloud_worker.chat.answer_parts import Part, ToolCall, suffix_length
from tinkercloud_worker.chat.rules.answer_rules import THINK, THINK_END, AnswerRule, Reasoning
from tinkercloud_worker.chat.rules.lark import HEADER, TEXT, json_rule, literal
from tinkercloud_worker.chat.tool_formats.json_calls import SPACE

_READ_AGAIN = 1 << 20
"""Maximum number of characters of an answer that are read for a mark and then for later ones.

Then text between a mark and its end is not searched for another mark.
"""
_AFTER_THINKING = r"AFTER_THINKING: /[ \n]{0,8}/"


class EndSearch(Protocol):
    """Searches a growing text for the end of what follows a mark."""

    def find(self, text: str) -> int | None:
        """Return where it ends; None if the end is not there yet."""


@dataclass(frozen=True, slots=True)
class Marking:
    """How a format marks calls."""

    begin: str
    """The mark before a call."""
    end: str
    """The mark after it; empty if there is none."""
    search: Callable[[int], EndSearch]
    """Begins a search for the end of a call whose content begins there."""
    calls_in: Callable[[str], list[ToolCall]]
    """Returns the calls that a content holds; none if a part of it is something else."""


class MarkedReader:
    """See `CallReader`. White space around calls belongs to the format.

    A mark whose content is no call is text, up to the next mark within this content, if there is
    one: models write of marks, too.
    """

    def __init__(self, marking: Marking) -> None:
        """Start before the first text."""
        self._marking = marking
        self._held = ""
        """Text that is not certain: a part of a mark, or a mark and what follows."""
        self._spaces: list[str] = []
        """White space before the held text. A call that follows removes it."""
        self._start = 0
        """Where the content after the held mark begins."""
        self._end: EndSearch | None = None
        """The search for the end of the call whose mark the held text has; None if it has none."""
        self._follows_call = False
        self._room = _READ_AGAIN
        """Characters that may be read once more."""

    def add(self, text: str) -> list[Part]:
        """Append text; return the parts that are certain."""
        self._held += text
        return self._read(is_last=False)

    def finish(self) -> list[Part]:
        """Return the rest of the text; a call that was not closed is one if it is complete."""
        parts = self._read(is_last=True)
        spaces = "".join(self._spaces)
        return [*parts, spaces] if spaces else parts

    def _read(self, *, is_last: bool) -> list[Part]:
        """Return the parts of the held text that are certain, and remove them."""
        held, begin = self._held, self._marking.begin
        parts: list[Part] = []
        position = 0
        while self._end is not None or (mark := held.find(begin, position)) >= 0:
            if self._end is None:
                parts += self._text(held[position:mark])
                position, self._start = mark, mark + len(begin)
                self._end = self._marking.search(self._start)
            end = self._end.find(held)
            if end is None and not is_last:
                self._cut(position)
                return parts
            self._end = None
            stop = len(held) if end is None else end
            content, after = held[self._start : stop], stop + len(self._marking.end)
            if calls := self._marking.calls_in(content):
                parts += calls
                self._spaces, self._follows_call = [], True
                position = after
                continue
            next_mark = held.find(begin, self._start, after) if self._room > 0 else -1
            if next_mark >= 0:
                self._room -= len(content)
                after = next_mark
            parts += self._text(held[position:after])
            position = after
        last = held[max(position, len(held) - len(begin)) :]
        certain = len(held) if is_last else len(held) - suffix_length(last, begin)
        parts += self._text(held[position:certain])
        self._held = held[certain:]
        return parts

    def _cut(self, position: int) -> None:
        """Remove the text before the held mark, whose end was not found."""
        if position:
            self._held = self._held[position:]
            self._start -= position
            # It reads what is left of the last text once more.
            self._end = self._marking.search(self._start)

    def _text(self, text: str) -> list[Part]:
        """Return what is shown of a text; the white space at its end waits for what follows."""
        content = text.rstrip(SPACE)
        shown = content
        if content:
            before = "".join(self._spaces)
            shown = content.lstrip(SPACE) if self._follows_call else before + content
            self._spaces, self._follows_call = [], False
        if len(content) < len(text) and not self._follows_call:
            self._spaces.append(text[len(content) :])
        return [shown] if shown else []


@dataclass(frozen=True, slots=True)
class MarkedForm:
    """How calls of a request may be written, in Lark."""

    begin: str
    """The mark, as text."""
    calls: str
    """What may follow one mark."""
    between: str | None
    """What may lie between that and the next mark; None if the mark is written once."""
    rules: Sequence[str]
    """The rules that `calls` uses."""


def marked_source(rule: AnswerRule, reasoning: Reasoning, form: MarkedForm) -> str:
    """Return the grammar of a rule whose calls begin with a mark."""
    calls, repeats = form.calls, not rule.is_one_call and form.between is not None
    forms = []
    if rule.has_text:
        # Calls begin where the mark is written for the first time, as for the reader of calls.
        forms.append(f"(tag ({calls}))* TEXT" if repeats else f"TEXT | tag ({calls})")
    elif rule.functions:
        marked = f"{literal(form.begin)} ({calls})"
        forms.append(f"{marked} ({form.between} {marked})*" if repeats else marked)
    if rule.json_schema is not None:
        forms.append("json")
    lines = [HEADER, f"start: {thought(rule, reasoning)}({' | '.join(forms)})"]
    if rule.has_text:
        lines += [TEXT, f"tag[lazy]: TEXT {literal(form.begin)}"]
    return "\n".join([*lines, *thought_rules(rule, reasoning), *form.rules, *json_rules(rule)])


def thought(rule: AnswerRule, reasoning: Reasoning) -> str:
    """Return what comes before the forms; free text includes reasoning."""
    if rule.has_text or reasoning is Reasoning.NONE:
        return ""
    if reasoning is Reasoning.OPEN:
        return "thought AFTER_THINKING "
    return f"({literal(THINK)} thought AFTER_THINKING)? "


def thought_rules(rule: AnswerRule, reasoning: Reasoning) -> list[str]:
    """Return the rules that `thought` uses."""
    if rule.has_text or reasoning is Reasoning.NONE:
        return []
    return [TEXT, f"thought[lazy]: TEXT {literal(THINK_END)}", _AFTER_THINKING]


def json_rules(rule: AnswerRule) -> list[str]:
    """Return the rule of an answer in JSON, named `json`, if the answer may be JSON."""
    return [] if rule.json_schema is None else [json_rule("json", rule.json_schema)]
