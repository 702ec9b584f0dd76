"""Tool calls in the XML of Qwen 3.5 and Qwen 3 Coder, which Nemotron 3 uses too.

<tool_call>
<function=f>
<parameter=a>
value
</parameter>
</function>
</tool_call>

A value is the text between the two line breaks: a string, unless the tool's schema says otherwise;
then it is JSON (`xml_values`). What is no whole call stays text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.chat.answer_parts import ToolCall
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.rules.lark import literal
from tinkercloud_worker.chat.tool_formats import xml_values
from tinkercloud_worker.chat.tool_formats.call_reader import (
    MarkedForm,
    MarkedReader,
    Marking,
    marked_source,
)
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|\Z))")
_FUNCTION_END, _LAST_PARAMETER_END = "</function>", "</parameter>"
_LAST_TAG = re.compile(r"<function=[^>\n]+>")
_LOOK_BACK = 4096
"""Characters before an end tag that show whether it ends a call."""
_ANY_PARAMETER = r'any_parameter: "<parameter=" KEY ">\n" STRING' + "\nKEY: /[^>\\n]+/"


class QwenXml(ToolFormat):
    """See the module."""

    name = "Qwen XML"
    marks = (_BEGIN, _END)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return all(each in template for each in (_BEGIN, "<function=", "<parameter="))

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader; see `ToolFormat`."""
        tools = {each.name: xml_values.Parameters(each.schema) for each in offered}
        marking = Marking(_BEGIN, _END, _CallEnd, partial(_calls_in, tools))
        return MarkedReader(marking) if offered else None

    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule; see `ToolFormat`."""
        rules = [xml_values.STRING, _ANY_PARAMETER]
        for number, function in enumerate(rule.functions):
            rules += _rules_of(f"call_{number}", function)
        calls = " | ".join(f"call_{number}" for number in range(len(rule.functions)))
        return marked_source(rule, reasoning, MarkedForm(_BEGIN, calls, '"\\n"?', rules))


class _CallEnd:
    """Searches a growing text for the tag that ends a call: the first after its last tags."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._position = start

    def find(self, text: str) -> int | None:
        """Return where the tag that ends the call begins; None if it is not there yet."""
        while (end := text.find(_END, self._position)) >= 0:
            if _is_whole(text[max(self._start, end - _LOOK_BACK) : end]):
                return end
            self._position = end + len(_END)
        self._position = max(self._position, len(text) - len(_END) + 1)
        return None


def _is_whole(text: str) -> bool:
    """Return whether a text ends as the content of a call. Values of calls may have tags, too."""
    text = text.rstrip()
    if not text.endswith(_FUNCTION_END):
        return False
    text = text.removesuffix(_FUNCTION_END).rstrip()
    if text.endswith(_LAST_PARAMETER_END):
        return True
    before = max(text.rfind(each, 0, -1) for each in ">\n")
    return bool(text.endswith(">") and _LAST_TAG.search(text, before + 1))


def _calls_in(tools: Mapping[str, xml_values.Parameters], text: str) -> list[ToolCall]:
    """Return the call that a tag holds; none if it is something else."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return []
    tool, members = tools.get(found[1]) or xml_values.Parameters({}), {}
    try:
        for name, value in _parameters_in(found[2]):
            if name in members:
                return []
            members[name] = tool.as_json(name, value)
    except ValueError:
        return []
    written = (f"{json.dumps(name, ensure_ascii=False)}: {each}" for name, each in members.items())
    return [ToolCall(found[1], f"{{{', '.join(written)}}}")]


def _parameters_in(text: str) -> list[tuple[str, str]]:
    """Return the names and values of parameters.

    Raises:
        ValueError: the text has something else.
    """
    parameters, position = [], 0
    while begin := _PARAMETER.match(text, position):
        end = _PARAMETER_END.search(text, begin.end())
        if end is None:
            raise ValueError("a parameter without its end")
        value = text[begin.end() : end.start()]
        parameters.append((begin[1], value.removeprefix("\n").removesuffix("\n")))
        position = end.end()
    if text[position:].strip():
        raise ValueError("more than parameters")
    return parameters


def _rules_of(call: str, function: Function) -> list[str]:
    """Return the rules of a call, whose parameters come in the order of the schema.

    Raises:
        InvalidRequest: the format can't express the schema or the name.
    """
    root = xml_values.resolved(function.schema, function.schema)
    if unknown := sorted(root.keys() - xml_values.OBJECT_KEYS):
        raise InvalidRequest(
            f"{function.field}: {', '.join(unknown)} can't be enforced at the top of a schema in"
            " the tool call format of this model; describe the object with properties"
        )
    given = {
        name: {} if schema is True else schema
        for name, schema in xml_values.properties_of(root).items()
    }
    properties = {name: schema for name, schema in given.items() if isinstance(schema, dict)}
    names = root.get("required")
    required = names if isinstance(names, list) else []
    for name in (function.name, *properties):
        if not re.fullmatch(r"[^>\n]+", name):
            raise InvalidRequest(
                f"{function.field}: the tool call format of this model has no place for the name"
                f" {name!r}; send one without '>' and line breaks"
            )
    rules, sequence = [], []
    for number, (name, schema) in enumerate(properties.items()):
        one, value = f"{call}_{number}", f"{call}_{number}_value"
        begin = literal(f"<parameter={name}>\n")
        rules.append(f"{one}: {begin} {value}")
        rules.append(xml_values.rule_of(value, schema, function.schema, f"{function.field}.{name}"))
        sequence.append(one if name in required else f"{one}?")
    if not properties and root.get("additionalProperties") is not False:
        sequence.append("any_parameter*")
    begin, end = literal(f"<function={function.name}>\n"), literal("</function>")
    written = " ".join(sequence)
    return [f'{call}: "\\n"? {begin} {written} {end} "\\n"? {literal(_END)}', *rules]
