"""Rules of this code base that no linter checks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "api_server",
    "benchmarks",
    "crds",
    "examples",
    "kube",
    "operator",
    "planning",
    "programs",
    "protocol",
    "tests",
    "tools",
    "worker_image",
)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PROGRAMS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
MAX_MODULE_LINES = 700
MAX_FUNCTION_LINES = 60


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_are_short(path: Path) -> None:
    too_long = [
        f"{node.name}: {(node.end_lineno or 0) - node.lineno} lines"
        for node in functions(path)
        if (node.end_lineno or 0) - node.lineno > MAX_FUNCTION_LINES
    ]

    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES, "split the module"
    assert too_long == [], "split the function"


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, "tools/write_docs.py", "--check"], cwd=ROOT, check=True)


def test_every_test_is_named_as_a_sentence() -> None:
    short = [
        f"{path.name}: {node.name}"
        for path in SOURCES
        if path.name.startswith("test_")
        for node in functions(path)
        if node.name.startswith("test_") and node.name.count("_") < 3
    ]

    assert short == []


def test_the_make_targets_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    mentioned = set(re.findall(r"`make ([a-z][a-z0-9-]*)", readme))
    defined = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))

    assert mentioned
    assert mentioned <= defined
