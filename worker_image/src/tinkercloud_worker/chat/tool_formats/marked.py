"""What formats share in which a mark begins a call: their reader and their grammar."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkercloud_worker.chat.answer_rules import THINK, THINK_END, AnswerRule, Reasoning
from tinkercloud_worker.chat.parts import Part, ToolCall, suffix_length
from tinkercloud_worker.chat.tool_formats.json_calls import SPACE
from tinkercloud_worker.chat.tool_formats.lark import HEADER, TEXT, json_rule, literal

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
    """See `CallReader`. White space around calls belongs to the format."""

    def __init__(self, marking: Marking) -> None:
        """Start before the first text."""
        self._marking = marking
        self._held = ""
        """Text that is not certain: white space, then a part of a mark or of a call."""
        self._start = 0
        """Where the content after the held mark begins."""
        self._end: EndSearch | None = None
        """The search for the end of the call whose mark the held text has; None if it has none."""
        self._follows_call = False

    def add(self, text: str) -> list[Part]:
        """Append text; return the parts that are certain."""
        self._held += text
        begin = self._marking.begin
        parts: list[Part] = []
        while self._end is not None or begin in self._held:
            if self._end is None:
                parts += self._before(self._held.index(begin))
                self._start = self._held.index(begin) + len(begin)
                self._end = self._marking.search(self._start)
            end = self._end.find(self._held)
            if end is None:
                return parts
            parts += self._taken(end)
        return parts + self._before(len(self._held) - suffix_length(self._held, begin))

    def finish(self) -> list[Part]:
        """Return the rest of the text; a call that was not closed is one if it is complete."""
        parts: list[Part] = []
        while self._end is not None:
            parts += self._taken(len(self._held))
            parts += self.add("")
        return parts + self._text(len(self._held))

    def _taken(self, end: int) -> list[Part]:
        """Remove the held mark, whose content ends there, and return its calls or its text."""
        self._end = None
        if calls := self._marking.calls_in(self._held[self._start : end]):
            self._held = self._held[end + len(self._marking.end) :]
            self._follows_call = True
            return list(calls)
        # The end may have been taken for a part of a string that was never closed.
        first_end = self._held.find(self._marking.end, self._start) if self._marking.end else end
        return self._text(len(self._held) if first_end < 0 else first_end + len(self._marking.end))

    def _before(self, length: int) -> list[Part]:
        """Remove text from the beginning of the held text, but for the white space at its end."""
        return self._text(len(self._held[:length].rstrip(SPACE)))

    def _text(self, length: int) -> list[Part]:
        """Remove text from the beginning of the held text; return what is shown of it."""
        text, self._held = self._held[:length], self._held[length:]
        if self._follows_call:
            text = text.lstrip(SPACE)
            self._follows_call = not text
        return [text] if text else []


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
