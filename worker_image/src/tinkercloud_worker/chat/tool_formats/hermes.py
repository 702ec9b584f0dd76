"""Tool calls in Hermes' format, which Qwen 2.5 and 3 use too.

<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>

A tag may hold several calls, one after another or in a list; a call without arguments has none.
Any other content of a tag is returned as text.
"""

import json
import re
from collections.abc import Sequence

from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.rules.lark import json_rule, literal
from tinkercloud_worker.chat.tool_formats.call_reader import (
    MarkedForm,
    MarkedReader,
    Marking,
    marked_source,
)
from tinkercloud_worker.chat.tool_formats.json_calls import MarkOutsideStrings, calls_in
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"
_OTHERS = ("<function=", "<arg_key>")
"""What templates write that use the same tag for parameters in XML: Qwen 3.5, GLM."""
_END = re.compile(END)


class Hermes(ToolFormat):
    """See the module."""

    name = "Hermes"
    marks = (BEGIN, END)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return BEGIN in template and not any(each in template for each in _OTHERS)

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader; see `ToolFormat`."""
        return MarkedReader(Marking(BEGIN, END, _end_after, calls_in)) if offered else None

    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule; see `ToolFormat`."""
        rules = []
        for number, function in enumerate(rule.functions):
            name = json.dumps(function.name, ensure_ascii=False)
            begin = literal(f'{{"name": {name}, "arguments": ')
            # Templates and trained models differ in the line breaks, which mean nothing.
            rules.append(f'call_{number}: "\\n"? {begin} json_{number} "}}" "\\n"? {literal(END)}')
            rules.append(json_rule(f"json_{number}", function.schema))
        calls = " | ".join(f"call_{number}" for number in range(len(rule.functions)))
        return marked_source(rule, reasoning, MarkedForm(BEGIN, calls, '"\\n"?', rules))


def _end_after(start: int) -> MarkOutsideStrings:
    return MarkOutsideStrings(start, _END, len(END))
