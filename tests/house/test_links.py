"""Links, tables and code blocks of the pages are valid."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(block: str) -> None:
    """Parse the commands of a block of console or shell; lines of output are skipped."""
    for line in re.sub(r"\\\n", " ", block).splitlines():
        if line.startswith("$ "):
            shlex.split(line.removeprefix("$ ").replace("'{{", "'"), comments=True)


def states(block: str) -> None:
    """Check that a drawing of states has only arrows, which is all that our drawings need."""
    kind, *arrows = block.splitlines()
    assert kind == "stateDiagram-v2"
    for arrow in arrows:
        assert re.fullmatch(r" +(\w+|\[\*\]) --> (\w+|\[\*\]): [^:;#]+", arrow), arrow


PARSERS: dict[str, Callable[[str], object]] = {
    "python": ast.parse,
    "yaml": lambda block: list(yaml.safe_load_all(block)),
    "json": json.loads,
    "toml": tomllib.loads,
    "console": commands,
    "sh": lambda block: None,
    "mermaid": states,
}
"""How the blocks of each language are checked. Python of the tutorial also runs in a test."""


def prose(page: Path) -> str:
    """Return a page without its code blocks, in which brackets are not links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def definitions(page: Path) -> list[tuple[str, str]]:
    """Return name and target of each `[name]: target`."""
    return re.findall(r"^\[([^\]]+)\]:\s*(\S+)", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates from the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_valid(page: Path, target: str) -> bool:
    """Return whether the target of a link exists. Addresses elsewhere are not checked."""
    if "://" in target:
        return True
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    return path.exists() and (not anchor or (path.suffix == ".md" and anchor in anchors(path)))


@each_page
def test_every_link_leads_to_an_existing_file_and_heading(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page))
    targets += [target for _, target in definitions(page)]

    assert [target for target in targets if not is_valid(page, target)] == []


@each_page
def test_every_reference_has_one_definition_and_every_definition_is_used(page: Path) -> None:
    used = set(re.findall(r"\]\[([^\]]+)\]", prose(page)))
    defined = [name for name, _ in definitions(page)]

    assert used - set(defined) == set(), "references without a definition"
    assert set(defined) - used == set(), "definitions without a reference"
    assert len(defined) == len(set(defined)), f"duplicate definitions: {sorted(defined)}"


def broken_rows(text: str) -> list[str]:
    """Return the rows of tables that do not render as such: no head, or another number of cells."""
    broken = []
    for block in re.split(r"\n(?! *\|)", text):
        rows = [line for line in block.splitlines() if line.lstrip().startswith("|")]
        counts = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        has_head = len(rows) > 1 and re.fullmatch(r" *\|( *:?-+:? *\|)+ *", rows[1])
        broken += [
            row
            for row, count in zip(rows, counts, strict=True)
            if not has_head or count != counts[1]
        ]
    return broken


@each_page
def test_every_row_of_a_table_has_a_head_and_its_number_of_cells(page: Path) -> None:
    assert broken_rows(prose(page)) == []


def test_a_row_behind_a_blank_line_or_with_another_cell_is_broken() -> None:
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n"

    assert broken_rows(f"Text:\n\n{table}\nText.") == []
    assert broken_rows(f"{table}\n| 3 | 4 |\n") == ["| 3 | 4 |"]
    assert broken_rows(f"{table}| 3 | 4 | 5 |\n") == ["| 3 | 4 | 5 |"]


@each_page
def test_every_code_block_parses_as_its_language(page: Path) -> None:
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)

    for language, block in blocks:
        PARSERS[language.strip() or "console"](block)
