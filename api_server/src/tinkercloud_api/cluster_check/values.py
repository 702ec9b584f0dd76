"""The values of a release, compared with those that the chart of this release has: pure."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import ValidationError

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.structural import structural_schema
from tinkercloud_protocol.wire.json_model import describe

Json = Any
"""A value of YAML."""
Schema = Mapping[str, Any]

_REFUSED: Any = ...
"""Stands for a value that the chart refuses."""
_SHOWN_CHARACTERS = 60
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "string": str,
}


@dataclass(frozen=True, slots=True)
class Release:
    """What a release of the chart is configured with."""

    values: Mapping[str, Any]
    """All values, defaults included, without those that the chart refuses."""
    models: Mapping[str, BaseModelSpec]
    """BaseModels that the release creates, by the name of the object."""
    faults: Sequence[str]
    """What the chart refuses: a sentence for each value."""
    is_given: bool
    """Whether somebody gave values; otherwise all are defaults."""


@cache
def chart_schema() -> Schema:
    """Return the types, keys and defaults of all values, which `tools/charts.py` generates."""
    found: Schema = json.loads(files(__package__).joinpath("values.schema.json").read_text())
    return found


@cache
def _model_schema() -> Schema:
    return structural_schema(BaseModelSpec)


def release_of(documents: Sequence[Json]) -> Release:
    """Return what values files configure; later ones override earlier ones, as with Helm.

    Args:
        documents: the content of each file; None for an empty one.
    """
    schema = chart_schema()
    faults: list[str] = []
    accepted: dict[str, Any] = {}
    for document in documents:
        found = _accepted(document or {}, schema, "", faults)
        accepted = merged(accepted, {} if found is _REFUSED else found)
    values = merged(_defaults(schema), accepted)
    models = {}
    for number, entry in enumerate(values["baseModels"] or []):
        model = _model(entry.get("spec"), f"baseModels[{number}].spec", faults)
        if model is not None:
            models[str(entry.get("name", number))] = model
    return Release(values, models, faults, is_given=bool(documents))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one mapping overridden by another, as Helm merges files."""
    result = dict(below)
    for key, value in above.items():
        before = result.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def _model(spec: Json, path: str, faults: list[str]) -> BaseModelSpec | None:
    known = len(faults)
    _accepted(spec, _model_schema(), path, faults)
    try:
        model = BaseModelSpec.model_validate(spec)
    except ValidationError as error:
        if len(faults) == known:
            faults.append(f"{path}: {describe(error)}")
        return None
    return model if len(faults) == known else None


def _accepted(value: Json, schema: Schema, path: str, faults: list[str]) -> Json:
    """Return a value without what a schema refuses, and add a sentence for each refusal."""
    if value is None:
        # Helm removes the default of a value that is null.
        return None
    if not _is_of_type(value, schema.get("type")):
        wanted = schema["type"] if isinstance(schema["type"], str) else " or ".join(schema["type"])
        faults.append(f"{path or 'values'}: expected {wanted}, got {_shown(value)}")
        return _REFUSED
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(map(str, schema["enum"]))
        faults.append(f"{path}: expected one of {choices}, got {_shown(value)}")
        return _REFUSED
    if "properties" in schema and isinstance(value, dict):
        known = schema["properties"]
        faults += [_unknown(path, str(key), known) for key in value if key not in known]
        parts = {
            key: _accepted(value[key], part, f"{path}.{key}" if path else key, faults)
            for key, part in known.items()
            if key in value
        }
        return {key: part for key, part in parts.items() if part is not _REFUSED}
    if "items" in schema and isinstance(value, list):
        items = [
            _accepted(item, schema["items"], f"{path}[{number}]", faults)
            for number, item in enumerate(value)
        ]
        return [item for item in items if item is not _REFUSED]
    return value


def _is_of_type(value: Json, wanted: str | Sequence[str] | None) -> bool:
    if wanted is None:
        return True
    names = [wanted] if isinstance(wanted, str) else [name for name in wanted if name != "null"]
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _TYPES[name]) for name in names)


def _shown(value: Json) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _unknown(path: str, key: str, known: Mapping[str, Any]) -> str:
    """Return a sentence about a key that the chart of this release does not have."""
    here = f"{path}.{key}" if path else key
    similar = difflib.get_close_matches(key, known, n=1)
    elsewhere = [each for each in _paths(chart_schema()) if each.rpartition(".")[2] == key]
    if similar:
        hint = f"did you mean {path}.{similar[0]}?" if path else f"did you mean {similar[0]}?"
    elif elsewhere:
        hint = f"did you mean {' or '.join(elsewhere[:3])}?"
    else:
        hint = "remove it, or use the charts of the release that the file was written for"
    return f"{here}: the chart of this release has no such value; {hint}"


def _paths(schema: Schema, path: str = "") -> Iterator[str]:
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here
        yield from _paths(part, here)


def _defaults(schema: Schema) -> Any:  # noqa: ANN401 - any value
    if "properties" in schema:
        return {name: _defaults(part) for name, part in schema["properties"].items()}
    return schema.get("default")
