"""The page docs/operate/custom-resources.md, from the definitions in crds/."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operate" / "custom-resources.md"
KINDS = ("basemodels", "trainingsessions", "tenants")
HEAD = """# Custom resources

<!-- Written by `make docs` from the definitions in crds/. Do not edit. -->

All fields of the custom resources. [Sessions on Kubernetes](kubernetes-sessions.md),
[quotas](quotas.md) and the [examples](../../crds/examples) show how they are used, and
`kubectl explain` prints the same descriptions. `[]` marks the elements of a list, `{}` the values
of a map, and **required** a field that its parent must have. The operator writes `status`.
"""
TABLE = "| Field | Type | Default | Meaning |\n| --- | --- | --- | --- |\n"

Schema = Mapping[str, Any]


def text() -> str:
    """Return the page."""
    return HEAD + "".join(_section(kind) for kind in KINDS)


def _section(plural: str) -> str:
    path = ROOT / "crds" / f"tinkercloud.dev_{plural}.yaml"
    spec = yaml.safe_load(path.read_text())["spec"]
    (version,) = spec["versions"]
    names, schema = spec["names"], version["schema"]["openAPIV3Schema"]
    short = ", ".join(f"`{name}`" for name in names["shortNames"])
    title = f"\n## {names['kind']}\n\n{_line(schema['description'])}\n\n"
    kind = f"`apiVersion: {spec['group']}/{version['name']}`, short name {short}\n\n"
    parts = {"properties": {name: schema["properties"][name] for name in ("spec", "status")}}
    return title + kind + TABLE + "".join(_rows(parts, "", {}))


def _rows(schema: Schema, parent: str, shown: dict[str, str]) -> Iterator[str]:
    """Yield the table rows of the fields inside a schema.

    Args:
        schema: the schema.
        parent: path of its field; empty for the whole resource.
        shown: paths of the fields with fields inside that have rows already, by those fields.
    """
    for name, field in schema.get("properties", {}).items():
        path = f"{parent}.{name}" if parent else name
        meaning = _line(field.get("description", ""))
        if name in schema.get("required", ()):
            meaning = f"**required** {meaning}"
        # Defaults of objects are those of their fields.
        default = field.get("default") if field["type"] != "object" else None
        value = "" if default is None else f"`{json.dumps(default)}`"
        inner, mark = _inside(field)
        known = shown.setdefault(json.dumps(inner.get("properties", path)), path)
        if known != path:
            meaning += f" Fields as in `{known}`."
        yield f"| `{path}` | {_type(field)} | {value} | {meaning} |\n"
        if known == path:
            yield from _rows(inner, path + mark, shown)


def _inside(field: Schema) -> tuple[Schema, str]:
    """Return the schema that has the fields inside a field, and the mark of its path."""
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(field.get(key), dict):
            return field[key], mark
    return field, ""


def _type(schema: Schema) -> str:
    """Return the type of a field, with its range or its values."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = "" if low is None or high is None else f", {low} to {high}"
    return f"{schema['type']}{limits}"


def _line(paragraphs: str) -> str:
    """Return a description as a cell of a table."""
    return " ".join(paragraphs.split()).replace("|", "\\|")
