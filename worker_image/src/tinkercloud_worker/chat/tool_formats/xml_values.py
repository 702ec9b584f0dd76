"""Values of parameters that are written as text: strings, unless the schema says otherwise."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, TypeGuard

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.rules.lark import json_rule, literal

Schema = Mapping[str, Any]
_END = literal("\n</parameter>\n")
"""One token with the string before it, since tokens are as long as possible."""
_NO_END = r"~/(.|\n)*<\/parameter>(.|\n)*/"
STRING = rf"STRING: (/(.|\n)*/ & {_NO_END}) {_END}"
"""The rule of any string: with the end tag in it, its end would not be certain."""
_NOTES = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly"),
    }
)
"""Keys of a schema that do not change what matches it."""
OBJECT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties"}
"""Keys at the top of a tool's schema that the format can express."""
_STRING_KEYS = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""How templates write values of earlier calls, so that models do, too."""
_MAX_STEPS = 32
"""Maximum number of references on the way to a schema."""
_MAX_ALTERNATIVES = 1024
"""Maximum number of alternatives of a parameter, together with their keys."""
_MAX_KEYS = 64
"""Maximum number of keys of a schema that is joined with another one."""
_KIND_OF_TYPE = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


class Parameters:
    """The parameters of one tool, for reading calls of it."""

    def __init__(self, root: Schema) -> None:
        """Take the schema of all parameters."""
        self._root = root
        self._kinds: dict[int, frozenset[str]] = {}
        """Types of JSON, by the identity of the schema that allows them."""

    @cached_property
    def _top(self) -> Schema:
        return resolved(self._root, self._root)

    def as_json(self, name: str, value: str) -> str:
        """Return the value of a parameter as JSON.

        It is the text of the model, unless the schema allows strings: then null is null, if the
        schema allows it, and all else is a string. What is no JSON is a string, too.

        Raises:
            ValueError: it has half of a surrogate pair.
        """
        kinds = self._kinds_of(name)
        if not kinds or "string" in kinds:
            is_null = value == "null" and "null" in kinds
            return value if is_null else json.dumps(value, ensure_ascii=False)
        text = value.strip()
        text = _PYTHON.get(text, text) if kinds & {"boolean", "null"} else text
        try:
            content = DECODER.decode(text)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        if has_half(content):
            raise ValueError("half of a surrogate pair")
        return text

    def _kinds_of(self, name: str) -> frozenset[str]:
        """Return the types of JSON that a parameter may have; none if the schema does not say."""
        schema = properties_of(self._top).get(name, self._top.get("additionalProperties"))
        if not isinstance(schema, dict):
            return frozenset()
        if id(schema) not in self._kinds:
            self._kinds[id(schema)] = _kinds(schema, self._root)
        return self._kinds[id(schema)]


def properties_of(schema: Schema) -> dict[str, Any]:
    """Return the properties of an object; what is no JSON schema names none."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _branches_of(schema: Schema) -> list[Any] | None:
    """Return the alternatives of a schema; None if it has none."""
    given = (schema.get(key) for key in ("anyOf", "oneOf"))
    return next((each for each in given if isinstance(each, list)), None)


def _values_of(schema: Schema) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not name them."""
    values = schema.get("enum")
    if isinstance(values, list):
        return values
    return [schema["const"]] if "const" in schema else None


def _length(schema: Schema, key: str) -> int | None:
    """Return a limit of a schema; None if it is no length."""
    given = schema.get(key)
    is_length = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    return given if is_length else None


def rule_of(name: str, schema: Schema, root: Schema, field: str) -> str:
    """Return the rule of a value with the end of its parameter.

    Raises:
        InvalidRequest: the format can't express the schema.
    """
    kinds = _kinds(schema, root)
    if kinds and "string" not in kinds:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = json_rule(f"{name}_json", {**schema, **definitions})
        return f"{name}: {name}_json {_END}\n{value}"
    forms = ['"null"'] if "null" in kinds else []
    strings = _strings_of(schema, root)
    if not strings:
        raise InvalidRequest(
            f"{field}: the schema has no alternatives that can be found in"
            f" {_MAX_ALTERNATIVES} steps; send a simpler one"
        )
    for each in strings:
        if unknown := sorted(each.keys() - _STRING_KEYS):
            raise InvalidRequest(
                f"{field}: {', '.join(unknown)} of a string can't be enforced in the tool call"
                " format of this model; use enum, minLength or maxLength, or leave it out"
            )
        forms.append(_string_form(each))
    return f"{name}: {name.upper()}\n{name.upper()}: ({' | '.join(forms)}) {_END}"


def _string_form(schema: Schema) -> str:
    """Return the expression of a string."""
    values = _values_of(schema)
    if values is not None:
        return " | ".join(literal(each) for each in values if isinstance(each, str)) or '""'
    least, most = _length(schema, "minLength"), _length(schema, "maxLength")
    return rf"(/(.|\n){{{least or 0},{'' if most is None else most}}}/ & {_NO_END})"


def _strings_of(schema: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema that allow strings; none if there are too many."""
    try:
        found = list(_alternatives(schema, root, opens_strings=True))
    except _TooManyError:
        return []
    return [each for each in found if not (kinds := _own_kinds(each)) or "string" in kinds]


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return what a schema that only refers to another one refers to."""
    for _ in range(_MAX_STEPS):
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for name in reference[2:].split("/"):
                target = target.get(name) if isinstance(target, dict) else None
            if not isinstance(target, dict):
                return schema
            schema = target
        elif _is_joined(parts) and len(schema) + len(parts[0]) <= _MAX_KEYS:
            schema = {**{key: schema[key] for key in schema if key != "allOf"}, **parts[0]}
        else:
            return schema
    return {}


def _is_joined(parts: Any) -> TypeGuard[list[dict[str, Any]]]:  # noqa: ANN401 - any JSON
    return isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict)


class _TooManyError(Exception):
    """A schema has more alternatives than are followed."""


def _alternatives(schema: Schema, root: Schema, *, opens_strings: bool = False) -> Iterator[Schema]:
    """Yield the schemas of which a value must match one, each once.

    Alternatives may lead back to themselves, and several ways may lead to one.

    Args:
        schema: the schema that has them.
        root: the schema of all parameters, which references point into.
        opens_strings: whether those of a schema that itself says "string" are yielded, too.

    Raises:
        _TooManyError: there are too many.
    """
    waiting: list[Any] = [schema]
    # Branches are parts of the root, so that none takes the identity of another.
    seen, size = {id(schema)}, 0
    while waiting:
        found = resolved(waiting.pop(), root)
        size += 1 + len(found)
        if size > _MAX_ALTERNATIVES:
            raise _TooManyError
        branches, own = _branches_of(found), _own_kinds(found)
        is_open = not own or (opens_strings and "string" in own)
        if branches is None or not is_open:
            yield found
            continue
        for branch in reversed(branches):
            if branch is True:
                yield {}
            elif isinstance(branch, dict) and id(branch) not in seen:
                seen.add(id(branch))
                waiting.append(branch)


def _kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the types of JSON that a schema allows; none if it does not say."""
    try:
        found = [_own_kinds(each) for each in _alternatives(schema, root)]
    except _TooManyError:
        return frozenset()
    return frozenset().union(*found) if all(found) else frozenset()


def _own_kinds(schema: Schema) -> frozenset[str]:
    """Return the types that a schema itself names; none if its alternatives may name them."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(str(each) for each in given)
    values = _values_of(schema)
    if values is not None:
        types = set(map(type, values))
        return frozenset(_KIND_OF_TYPE.get(each, "number") for each in types)
    if _branches_of(schema) is not None:
        return frozenset()
    if isinstance(schema.get("properties"), dict):
        return frozenset({"object"})
    return frozenset({"array"}) if isinstance(schema.get("items"), dict | bool) else frozenset()
