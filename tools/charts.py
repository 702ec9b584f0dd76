"""Generate files from `charts/tinkercloud/values.schema.yaml`; with --check, only compare.

charts/tinkercloud/values.yaml          defaults, each with its description
charts/tinkercloud/values.schema.json   the schema that Helm validates values against
charts/tinkercloud/README.md            the table of values
api_server/.../values.schema.json       keys, types and defaults, for `tinkercloud cluster check`
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tinkercloud_crds.base_model import BaseModelSpec

Schema = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tinkercloud"
OUTLINE = ROOT / "api_server" / "src" / "tinkercloud_api" / "cluster_check" / "values.schema.json"
MODELS: dict[str, type[BaseModel]] = {"BaseModelSpec": BaseModelSpec}
TABLE_START, TABLE_END = "<!-- values -->", "<!-- /values -->"
TABLE_HEAD = "| Value | Default | Meaning |\n| --- | --- | --- |"
HEADER = "Written by `python tools/charts.py` from values.schema.yaml. Do not edit."
WIDTH = 100


def expanded(schema: Schema, definitions: Schema, default: object = None) -> Schema:
    """Return a closed schema without references, in which each property has its default.

    Args:
        schema: Schema of a value in values.schema.yaml.
        definitions: Definitions that it refers to.
        default: Default from an outer schema, which overrides the schema's own.
    """
    if "x-model" in schema:
        return {"$ref": f"#/definitions/{schema['x-model']}"}
    if "$ref" in schema:
        part = definitions[schema["$ref"].rsplit("/", 1)[1]]
        schema = part | {key: value for key, value in schema.items() if key != "$ref"}
    if default is None:
        default = schema.get("default")
    if "properties" in schema:
        inner = default if isinstance(default, dict) else {}
        properties = {
            name: expanded(part, definitions, inner.get(name))
            for name, part in schema["properties"].items()
        }
        rest = {key: value for key, value in schema.items() if key != "default"}
        return rest | {"additionalProperties": False, "properties": properties}
    if "items" in schema:
        schema = schema | {"items": expanded(schema["items"], definitions)}
    return schema if default is None else schema | {"default": default}


def model_schemas() -> Schema:
    """Return the closed JSON schemas of the custom resources' specifications and their parts."""
    found: Schema = {}
    for name, model in MODELS.items():
        schema = model.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
        found |= schema.pop("$defs")
        found[name] = schema
    return {name: plain(schema) for name, schema in sorted(found.items())}


def plain(schema: Any) -> Any:  # noqa: ANN401 - a schema, or any part of one
    """Return a closed pydantic schema without the keys that Helm does not need."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: plain(part) for name, part in value.items()}
            kept["additionalProperties"] = False
        elif key == "description":
            kept[key] = " ".join(value.split())
        elif not key.startswith("x-") and key not in {"title", "default"}:
            kept[key] = plain(value)
    return kept


def outline(schema: Schema) -> Schema:
    """Return the keys, types and defaults of an expanded schema, without models."""
    kept = {key: schema[key] for key in ("type", "enum", "default") if key in schema}
    if "properties" in schema:
        kept["properties"] = {name: outline(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        kept["items"] = outline(schema["items"])
    return kept


def defaults(schema: Schema) -> Any:  # noqa: ANN401 - any value
    """Return the default values of an expanded schema; None if there is none."""
    if "properties" in schema:
        found = {name: defaults(part) for name, part in schema["properties"].items()}
        return {name: value for name, value in found.items() if value is not None}
    return schema.get("default")


def values_lines(schema: Schema, indent: str = "") -> list[str]:
    """Return the lines of values.yaml: every property with a default, and its description."""
    lines = []
    for name, part in schema["properties"].items():
        value = defaults(part)
        if value is None or ("properties" in part and not value):
            continue
        lines += textwrap.wrap(
            part.get("description", ""),
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        if "properties" in part:
            lines += [f"{indent}{name}:", *values_lines(part, indent + "  ")]
        else:
            lines += textwrap.indent(as_yaml({name: value}), indent).splitlines()
    return lines


def as_yaml(value: Any) -> str:  # noqa: ANN401 - any value
    """Return YAML in block style, with empty collections inline."""
    return yaml.safe_dump(value, sort_keys=False, width=WIDTH, allow_unicode=True)


def table_lines(schema: Schema, path: str = "") -> list[str]:
    """Return the table of all values."""
    lines = []
    for name, part in schema["properties"].items():
        here = f"{path}.{name}" if path else name
        if "properties" in part:
            lines += table_lines(part, here)
            continue
        default = json.dumps(part["default"]) if "default" in part else ""
        meaning = part.get("description", "").replace("|", "\\|")
        lines.append(f"| `{here}` | {f'`{default}`' if default else ''} | {meaning} |")
    return lines


def files() -> dict[Path, str]:
    """Return the content of every generated file."""
    source = yaml.safe_load((CHART / "values.schema.yaml").read_text())
    definitions = source.pop("definitions")
    schema = expanded(source, definitions)
    readme = CHART / "README.md"
    before, _, rest = readme.read_text().partition(TABLE_START)
    after = rest.partition(TABLE_END)[2]
    table = "\n".join(
        ["| Value | Default | Meaning |", "| --- | --- | --- |", *table_lines(schema)]
    )
    return {
        CHART / "values.yaml": "\n".join([f"# {HEADER}", *values_lines(schema)]) + "\n",
        CHART / "values.schema.json": json.dumps(
            {"$comment": HEADER, **schema, "definitions": model_schemas()}, indent=2
        )
        + "\n",
        readme: f"{before}{TABLE_START}\n{table}\n{TABLE_END}{after}",
        OUTLINE: json.dumps({"$comment": HEADER, **outline(schema)}, indent=1) + "\n",
    }


def is_fresh(path: Path, text: str) -> bool:
    """Return whether a file has this content."""
    return path.is_file() and path.read_text() == text


def main() -> None:
    """Write the files, or list those that are out of date."""
    wanted = files()
    stale = [path for path, text in wanted.items() if not is_fresh(path, text)]
    if "--check" in sys.argv:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.exit(f"out of date: {names}; run `make generate`")
        return
    for path in stale:
        path.write_text(wanted[path])


main()
