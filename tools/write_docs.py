"""Write the pages of docs/ that are derived from code and data; with --check, only compare.

docs/operate/configuration.md   from `Settings` of the API server and of the operator
docs/operate/custom-resources.md from the definitions in crds/
docs/understand/suspend-and-resume.md its drawings of states, from the table of transitions
docs/benchmarks.md              from benchmarks/results
docs/compatibility.md           from docs/compatibility.json, which `make compatibility` writes
docs/contribute/evidence.md     from docs/contribute/evidence.yaml
README.md                       Tinkercloud's column of the comparison, from the same file
examples/tutorial.ipynb         from docs/use/tutorial.md
README.md of packages           their tables of folders, from the first lines of docstrings
"""

import ast
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmark_page
import custom_resources
import model_states
import yaml
from compatibility import page as compatibility
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinkercloud_api.config.settings import CONFIG_FILE_VARIABLE, ENV_PREFIX, Settings
from tinkercloud_operator import settings as operator

ROOT = Path(__file__).parent.parent
CONFIGURATION = ROOT / "docs" / "operate" / "configuration.md"
README = ROOT / "README.md"
EVIDENCE = ROOT / "docs" / "contribute" / "evidence.md"
TUTORIAL = ROOT / "docs" / "use" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
EVIDENCE_DATA = EVIDENCE.with_suffix(".yaml")
READMES = [
    ROOT / folder / "README.md" for folder in ("api_server", "operator", "protocol", "worker_image")
]
FOLDERS_START = "<!-- Folders: written by `make docs` from docstrings. Do not edit. -->"
FOLDERS_END = "<!-- End of folders. -->"
CONFIGURATION_HEAD = f"""# Configuration

<!-- Written by `make docs` from the settings' own definitions. Do not edit. -->

This page lists the settings of the API server and the `tinkercloud` command, and
[those of the operator](#the-operator).

## The API server

Each setting has an environment variable. Write lists and tables as JSON, such as
`TINKERCLOUD_MODELS='{{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}}'`. You can also use a TOML file:
set `{CONFIG_FILE_VARIABLE}` to its path. Its keys are the names of the variables in lower case,
without the prefix; nested settings are tables:

```toml
port = 8001

[models]
"Qwen/Qwen3-0.6B" = "/models/qwen3-0.6b"

[limits]
max_lora_rank = 64
```

Options of `tinkercloud serve` take precedence over environment variables, and environment variables
over the file. Unknown settings are rejected.

With `TINKERCLOUD_PROVIDER=kubernetes`, the operator starts heads and configures them from the
BaseModels and its own settings. The API server then rejects settings of heads, and the error
message says where to set them instead. These are `models`, `preload`, `orphan_grace_seconds`,
`session_expiry_days`, `session_silence_seconds`, `head_start_seconds`, `trainer`, `sampler`,
`limits` except `max_body_bytes` (which may be lowered), and `timings` except `long_poll_seconds`.

"""
OPERATOR_HEAD = """
## The operator

The operator is configured with environment variables. Write lists and tables as JSON. The chart
sets most of the variables from its values; use `operator.env` to set the others. Unknown variables
with the prefix `TINKERCLOUD_OPERATOR_` are rejected.

"""
SETTINGS_TABLE = """\
| Environment variable | Default | Meaning |
| --- | --- | --- |
"""
MACHINE_DEFAULTS = {
    "state_dir": "a folder in the user's data home",
    "identity": "the name of the pod",
}
"""Defaults that differ between machines."""

EVIDENCE_HEAD = """# Evidence

<!-- Written by `make docs` from evidence.yaml. Do not edit. -->

Each claim about trainers, samplers, durability, pools and quotas, with its verdict and the tests that
prove it. The short version for users is [Supported](../supported.md).

| Verdict | Meaning |
| --- | --- |
| **CPU** | proven on a CPU: the linked test or figure runs a real model, real ranks, a real server |
| **H200** | proven on one H200 by `python -m benchmarks.gpu` on 2026-11-20 with torch 2.11. Figures that name an H100 are of one H100, by the same command on 2026-11-26. [Changes since](gpu-benchmarks.md#since-then), and the torch 2.13 of our images, have run on CPUs only |
| **definitions** | tested against [the other program's own definitions](sglang-on-cpu.md#tests-against-definitions), but that program has not run |
| **unproven** | implemented, not verified |
| **refused** | refused by an error that names it |
| **not written** | not implemented. An empty cell claims nothing; `-` means not applicable |

Anything that names neither an H200 nor an H100 has not run on a GPU. M, N, G and P are [figures of the GPU
command](gpu-benchmarks.md); S1-S30 compare [SGLang itself on a CPU](sglang-on-cpu.md), by a command
whose results are committed and which CI does not repeat. Nor does CI repeat tests that take half a
minute or more, and most of the shapes of ranks: `make test-long` does. A *whole model* is one that is trained by
full fine-tuning, as opposed to an adapter. TP2 means two ranks of tensor parallelism; likewise PP
pipeline, CP context, EP expert and DP data parallelism.
"""  # noqa: E501
COLUMNS = {
    "torch": "torch",
    "megatron": "megatron",
    "sglang": "`sglang` engines",
    "vllm": "vLLM",
    "server": "Evidence",
}
COMPARISON = re.compile(r"(?<=^\| \| Tinkercloud \|).*?(?=\n\n)", re.M | re.S)
"""The comparison of the README, from the second cell of its head on."""


def configuration() -> str:
    """Return the page of all settings."""
    tables = [
        SETTINGS_TABLE + "\n".join(rows(model, prefix)) + "\n"
        for model, prefix in ((Settings, ENV_PREFIX), (operator.Settings, operator.ENV_PREFIX))
    ]
    return CONFIGURATION_HEAD + tables[0] + OPERATOR_HEAD + tables[1]


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    """Return one table row for each setting."""
    lines = []
    for name, field in model.model_fields.items():
        variable = f"{prefix}{name.upper()}"
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            lines += rows(nested, f"{variable}__")
        else:
            shown = MACHINE_DEFAULTS.get(name) or default(field)
            lines.append(f"| `{variable}` | {shown} | {meaning(field)} |")
    return lines


def default(field: FieldInfo) -> str:
    """Return the default of a field as Markdown."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f"`{json.dumps(value) if isinstance(value, dict | list) else value}`"


def meaning(field: FieldInfo) -> str:
    """Return a field's documentation on one line."""
    return " ".join((field.description or "").split()).replace("|", "\\|")


def evidence() -> str:
    """Return the page of all claims."""
    return EVIDENCE_HEAD + "".join(area_section(area) for area in load_evidence()["areas"])


def load_evidence() -> dict[str, Any]:
    """Return the content of evidence.yaml."""
    content: dict[str, Any] = yaml.safe_load(EVIDENCE_DATA.read_text())
    return content


def area_section(area: Mapping[str, Any]) -> str:
    """Return the section of one area: a table of claims by engine."""
    columns = [key for key in COLUMNS if any(key in row for row in area["rows"])]
    head = " | ".join(["Claim", *(COLUMNS[key] for key in columns)])
    lines = [f"| {head} |", "| --- " * (len(columns) + 1) + "|"]
    for row in area["rows"]:
        cells = [row["claim"], *(claim_cell(row[key]) if key in row else "" for key in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return f"\n## {area['title']}\n\n" + "\n".join(lines) + "\n"


def claim_cell(claim: Mapping[str, Any]) -> str:
    """Return a verdict and links to what proves it."""
    links = []
    for path in claim.get("by", []):
        name = Path(path).stem.removeprefix("test_")
        links.append(f"[{name}]({os.path.relpath(ROOT / path, EVIDENCE.parent)})")
    return " · ".join([claim["says"], *links])


def readme() -> str:
    """Return the README with Tinkercloud's column of the comparison as the evidence says.

    Raises:
        SystemExit: if the table and the evidence do not list the same features.
    """
    here = {row["feature"]: row["here"] for row in load_evidence()["comparison"]}
    text = README.read_text()
    table = COMPARISON.search(text)
    listed = re.findall(r"^\| ([^|]+?) \|", table[0], re.M)[1:] if table else []
    if not table or set(listed) != here.keys():
        differing = ", ".join(sorted(set(listed) ^ here.keys()))
        sys.exit(f"list in the comparisons of README.md and {EVIDENCE_DATA.name}: {differing}")

    def row(match: re.Match[str]) -> str:
        return f"| {match[1]} | {here[match[1]]} |" if match[1] in here else match[0]

    generated = re.sub(r"^\| ([^|]+?) \| [^|]* \|", row, table[0], flags=re.M)
    return text[: table.start()] + generated + text[table.end() :]


def notebook() -> str:
    """Return the tutorial as a notebook: a cell of code for each block of Python."""
    parts = re.split(r"^```python\n(.*?)^```\n", TUTORIAL.read_text(), flags=re.M | re.S)
    cells = []
    for number, part in enumerate(parts):
        is_code = number % 2 == 1
        source = part.strip() if is_code else outside_docs(part.strip())
        cell: dict[str, Any] = {
            "cell_type": "code" if is_code else "markdown",
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        if is_code:
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def outside_docs(markdown: str) -> str:
    """Return Markdown of the tutorial with its links as seen from the notebook's folder."""

    def link(match: re.Match[str]) -> str:
        if "://" in match[1]:
            return match[0]
        return f"]({os.path.relpath(TUTORIAL.parent / match[1], NOTEBOOK.parent)})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)


def with_folders(readme: Path) -> str:
    """Return the README of a package with its table of folders and top-level modules."""
    [package] = (readme.parent / "src").glob("tinkercloud*")
    tops = [path for path in package.glob("*.py") if path.name != "__init__.py"]
    folders = [path.parent for path in package.rglob("__init__.py") if path.parent != package]
    shown = [folder for folder in folders if "migrations" not in folder.parts]
    rows = [
        f"| `{path.relative_to(package)}{'/' * path.is_dir()}` | {summary(path)} |"
        for path in [*sorted(shown), *sorted(tops)]
    ]
    table = "\n".join(["| Where | What |", "| --- | --- |", *rows])
    before, rest = readme.read_text().split(FOLDERS_START)
    _, after = rest.split(FOLDERS_END)
    return f"{before}{FOLDERS_START}\n{table}\n{FOLDERS_END}{after}"


def summary(path: Path) -> str:
    """Return the first paragraph of the docstring of a module or a package."""
    source = (path / "__init__.py" if path.is_dir() else path).read_text()
    paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def main() -> None:
    """Write the pages, or name those that are stale."""
    pages = {
        CONFIGURATION: configuration(),
        EVIDENCE: evidence(),
        README: readme(),
        NOTEBOOK: notebook(),
        benchmark_page.PAGE: benchmark_page.text(),
        compatibility.PAGE: compatibility.text(),
        custom_resources.PAGE: custom_resources.text(),
        model_states.PAGE: model_states.text(),
    }
    pages |= {readme: with_folders(readme) for readme in READMES}
    if "--check" in sys.argv:
        if not compatibility.is_current():
            sys.exit(f"stale, run `make compatibility`: {compatibility.RESULTS}")
        stale = [
            path for path, text in pages.items() if not path.exists() or path.read_text() != text
        ]
        if stale:
            sys.exit(f"stale, run `make docs`: {', '.join(map(str, stale))}")
        return
    for path, text in pages.items():
        path.write_text(text)


main()
