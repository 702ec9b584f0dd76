"""What the text of an answer may be: rules from the fields of requests.

The format of the model's tool calls turns them into grammars (`tool_formats`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.chat.rules.lark import HEADER, json_rule

THINK, THINK_END = "<think>", "</think>"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
MAX_SCHEMA_CHARACTERS = 1 << 16
"""Maximum length of the schemas of one request, in JSON."""
MAX_DEPTH = 64
"""Maximum nesting of a schema, in objects and lists."""
_MAX_NUMBER = 1 << 53
"""The grammar would round larger numbers."""


class Reasoning(Enum):
    """Whether an answer begins with reasoning, as its prompt ends."""

    NONE = "none"
    POSSIBLE = "possible"
    OPEN = "open"
    """The prompt ends within it."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments."""
    field: str
    """The field of the request that has the schema."""
    is_strict: bool = False
    """Whether the request insists on the schema."""


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """The forms that an answer may have; at least one."""

    json_schema: Mapping[str, Any] | None = None
    """The schema of an answer in JSON; None if it may not be one."""
    json_field: str = "response_format"
    """The field of the request that has this schema."""
    functions: Sequence[Function] = ()
    """The functions that it may call."""
    is_one_call: bool = False
    """Whether it may have only one call."""
    has_text: bool = False
    """Whether it may be text, also before calls."""

    @property
    def is_needed(self) -> bool:
        """Whether a request fails if its answer can't be constrained.

        Agents ask for strict tools of all models and servers, and check the calls themselves.
        """
        return not self.has_text


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a request wants called."""

    kind: str = "auto"
    """"auto", "none", "required" or "named"."""
    name: str | None = None
    """The function that must be called; of kind "named"."""
    is_one_call: bool = False
    """Whether at most one call is wanted."""


def rule_of(
    functions: Sequence[Function],
    choice: ToolChoice,
    json_schema: Mapping[str, Any] | None = None,
    json_field: str = "response_format",
) -> AnswerRule | None:
    """Return the rule of an answer; None if it may be any text.

    Args:
        functions: the tools of the request.
        choice: which of them it wants called.
        json_schema: the schema of an answer in JSON; None if the request has none.
        json_field: the field of the request that has this schema.

    Raises:
        InvalidRequest: the choice needs a tool that the request does not have.
    """
    if choice.kind in {"auto", "none"}:
        offered = functions if choice.kind == "auto" else ()
        if json_schema is None:
            offered = [_as_called(each) for each in offered]
        is_bound = choice.is_one_call or any(each.is_strict for each in offered)
        if json_schema is None and not (offered and is_bound):
            return None
        has_text = json_schema is None
        return AnswerRule(json_schema, json_field, offered, choice.is_one_call, has_text)
    if not functions:
        raise InvalidRequest(
            "tool_choice: asks for a call, but the request has no tools; send tools, or"
            ' tool_choice "none"'
        )
    if choice.kind == "required":
        return AnswerRule(functions=functions, is_one_call=choice.is_one_call)
    named = [each for each in functions if each.name == choice.name]
    if not named:
        known = ", ".join(each.name for each in functions[:8])
        raise InvalidRequest(
            f"tool_choice: the request has no tool named {choice.name!r}; choose one of {known}"
        )
    return AnswerRule(functions=named[:1], is_one_call=True)


def _as_called(function: Function) -> Function:
    """Return a function with the schema that its calls must have alongside free text."""
    return function if function.is_strict else replace(function, schema=ANY_OBJECT)


def schemas_of(rule: AnswerRule) -> list[tuple[str, str]]:
    """Return the field of each schema of a rule, and its grammar alone.

    Raises:
        InvalidRequest: a schema is too large or too deep, or has a number that would be rounded.
    """
    given = [(each.field, each.schema) for each in rule.functions]
    if rule.json_schema is not None:
        given.append((rule.json_field, rule.json_schema))
    sources, size = [], 0
    for field, schema in given:
        _check(schema, field)
        source = "\n".join([HEADER, "start: json", json_rule("json", schema)])
        size += len(source)
        if size > MAX_SCHEMA_CHARACTERS:
            raise InvalidRequest(
                f"{field}: the JSON schemas of this request have more than"
                f" {MAX_SCHEMA_CHARACTERS} characters; send smaller ones, or fewer tools"
            )
        sources.append((field, source))
    return sources


def _check(schema: Mapping[str, Any], field: str) -> None:
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise InvalidRequest(
                    f"{field}: the JSON schema is nested in more than {MAX_DEPTH} levels; send one"
                    " with fewer, for example with $defs"
                )
            members = value.values() if isinstance(value, dict) else value
            waiting += [(member, depth + 1) for member in members]
        elif isinstance(value, int | float) and abs(value) > _MAX_NUMBER:
            raise InvalidRequest(
                f"{field}: numbers in a JSON schema must be between -2**53 and 2**53, got"
                f" {str(value)[:40]}"
            )
