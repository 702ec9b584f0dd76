"""Values of parameters that are written as text: strings, unless the schema says otherwise."""

import json
from collections.abc import Mapping
from typing import Any

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.tool_formats.lark import json_rule, literal

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
"""Maximum number of references and alternatives on the way to a schema."""
_KIND_OF_TYPE = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


def parameter(schema: Schema, name: str) -> Schema:
    """Return the schema of a parameter; an empty one if there is none."""
    root = resolved(schema, schema)
    found = root.get("properties", {}).get(name, root.get("additionalProperties"))
    return found if isinstance(found, dict) else {}


def as_json(value: str, schema: Schema, root: Schema) -> str:
    """Return a value as JSON.

    It is the text of the model, unless the schema allows strings: then null is null, if the schema
    allows it, and all else is a string. What is no JSON is a string, too.

    Args:
        value: the text.
        schema: its schema.
        root: the schema of all parameters, which references point into.

    Raises:
        ValueError: it has half of a surrogate pair.
    """
    kinds = _kinds(schema, root, _MAX_STEPS)
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


def rule_of(name: str, schema: Schema, root: Schema, field: str) -> str:
    """Return the rule of a value with the end of its parameter.

    Raises:
        InvalidRequest: the format can't express the schema.
    """
    kinds = _kinds(schema, root, _MAX_STEPS)
    if kinds and "string" not in kinds:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = json_rule(f"{name}_json", {**schema, **definitions})
        return f"{name}: {name}_json {_END}\n{value}"
    forms = ['"null"'] if "null" in kinds else []
    for each in _strings_of(schema, root, _MAX_STEPS):
        if unknown := sorted(each.keys() - _STRING_KEYS):
            raise InvalidRequest(
                f"{field}: {', '.join(unknown)} of a string can't be enforced in the tool call"
                " format of this model; use enum, minLength or maxLength, or leave it out"
            )
        forms.append(_string_form(each))
    return f"{name}: {name.upper()}\n{name.upper()}: ({' | '.join(forms)}) {_END}"


def _string_form(schema: Schema) -> str:
    """Return the expression of a string."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return " | ".join(literal(each) for each in values if isinstance(each, str)) or '""'
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"(/(.|\n){{{least},{most}}}/ & {_NO_END})"


def _strings_of(schema: Schema, root: Schema, steps: int) -> list[Schema]:
    """Return the alternatives of a schema that allow strings."""
    schema = resolved(schema, root)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if branches is None or not steps:
        return [schema]
    found = []
    for branch in branches:
        kinds = _kinds(branch, root, steps)
        if not kinds or "string" in kinds:
            found += _strings_of(branch, root, steps - 1)
    return found


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
        elif isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
            schema = {**{key: schema[key] for key in schema if key != "allOf"}, **parts[0]}
        else:
            return schema
    return {}


def _kinds(schema: Any, root: Schema, steps: int) -> frozenset[str]:  # noqa: ANN401 - any JSON
    """Return the types of JSON that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or not steps:
        return frozenset()
    schema = resolved(schema, root)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(str(each) for each in given)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(_KIND_OF_TYPE.get(type(each), "number") for each in values)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(branches, list):
        found = [_kinds(branch, root, steps - 1) for branch in branches]
        return frozenset().union(*found) if all(found) else frozenset()
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()
