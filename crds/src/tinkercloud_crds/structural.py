"""Conversion of a pydantic model to a Kubernetes structural schema.

Kubernetes accepts a subset of OpenAPI v3 (no references, no unions with null, no titles) and adds
CEL rules and list types. Every string, list and map must be bounded, or the API server cannot bound
the cost of a CEL rule; `structural_schema` rejects a model with an unbounded field.
"""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

Schema = dict[str, Any]

_KEPT = {
    "default",
    "description",
    "enum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "pattern",
    "type",
    "uniqueItems",
}


class Part(BaseModel):
    """A part of a custom resource. Fields are snake_case in Python and camelCase in YAML.

    Unknown fields are ignored when reading, so that an older program can read what the API server
    of a later version stores.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        frozen=True,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


def rules(*pairs: tuple[str, str]) -> Schema:
    """Return CEL rules for the `json_schema_extra` of a model or a field.

    Args:
        pairs: Rule and message of each.
    """
    return {
        "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]
    }


IMMUTABLE = ("self == oldSelf", "is immutable; create a new session")


class UnboundedError(ValueError):
    """A string, list or map of a model has no upper bound."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a model.

    Raises:
        UnboundedError: A field has no upper bound; the message names it.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}), path=model.__name__)


def without_defaults(schema: Schema) -> Schema:
    """Return a schema without defaults, for a status, which contains only what was observed."""
    result = {key: value for key, value in schema.items() if key != "default"}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = without_defaults(result[key])
    if "properties" in result:
        result["properties"] = {
            name: without_defaults(child) for name, child in result["properties"].items()
        }
    return result


def _convert(node: Schema, definitions: Mapping[str, Schema], path: str) -> Schema:
    node = _resolved(node, definitions)
    result: Schema = {
        key: value for key, value in node.items() if key in _KEPT or key.startswith("x-kubernetes-")
    }
    if "description" in result:
        result["description"] = " ".join(str(result["description"]).split())
    if result.get("default", ...) is None:
        del result["default"]
    elif isinstance(result.get("default"), dict):
        # Kept whole, although its fields have defaults of their own: CEL rules see it as it is.
        result["default"] = _without_nulls(result["default"])
    _exclusive_bounds(node, result)
    if "const" in node:
        result["enum"] = [node["const"]]
    if "properties" in node:
        result["properties"] = {
            name: _convert(child, definitions, f"{path}.{name}")
            for name, child in node["properties"].items()
        }
        if node.get("required"):
            result["required"] = node["required"]
    elif isinstance(node.get("additionalProperties"), dict):
        values = cast("Schema", node["additionalProperties"])
        result["additionalProperties"] = _convert(values, definitions, f"{path}[*]")
    if "items" in node:
        result["items"] = _convert(node["items"], definitions, f"{path}[]")
    _check_bounds(result, path)
    return result


def _without_nulls(value: Schema) -> Schema:
    return {
        key: _without_nulls(child) if isinstance(child, dict) else child
        for key, child in value.items()
        if child is not None
    }


def _resolved(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Return a node without references and without the null of an optional field."""
    own = {key: value for key, value in node.items() if key not in {"$ref", "anyOf", "allOf"}}
    if "$ref" in node:
        target = definitions[str(node["$ref"]).rpartition("/")[2]]
        return _merged(_resolved(target, definitions), own)
    alternatives = [part for part in node.get("anyOf", []) if part != {"type": "null"}]
    if len(alternatives) == 1:
        return _merged(_resolved(alternatives[0], definitions), own)
    if alternatives and "x-kubernetes-int-or-string" not in node:
        raise ValueError(f"a union has no structural schema: {node}")
    return own


def _merged(target: Schema, own: Schema) -> Schema:
    """Return a definition as its user sees it: the user's description, and the rules of both."""
    key = "x-kubernetes-validations"
    both = [*target.get(key, []), *own.get(key, [])]
    return target | own | ({key: both} if both else {})


def _exclusive_bounds(node: Schema, result: Schema) -> None:
    """Write exclusive bounds as OpenAPI v3.0 does: a number and a flag."""
    for name in ("Minimum", "Maximum"):
        if (bound := node.get(f"exclusive{name}")) is not None:
            result[name.lower()] = bound
            result[f"exclusive{name}"] = True


def _check_bounds(schema: Schema, path: str) -> None:
    bounded_by = {
        "string": {"maxLength", "enum", "format"},
        "array": {"maxItems"},
        "object": {"maxProperties", "properties"},
    }
    wanted = bounded_by.get(str(schema.get("type")))
    if wanted is not None and not wanted & schema.keys():
        raise UnboundedError(f"{path}: unbounded; set one of {', '.join(sorted(wanted))}")
