"""Links of the pages lead somewhere, whichever way Markdown writes them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")]
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def definitions(page: Path) -> list[tuple[str, str]]:
    """Return name and target of each `[name]: target`."""
    return re.findall(r"^\[([^\]]+)\]:\s*(\S+)", text(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, target: str) -> bool:
    if "://" in target:
        return True
    file, _, anchor = target.partition("#")
    there = page.parent / file if file else page
    return there.exists() and (not anchor or (there.suffix == ".md" and anchor in anchors(there)))


@each_page
def test_every_link_leads_to_a_file_that_is_there_and_a_heading_that_it_has(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text(page))
    targets += [target for _, target in definitions(page)]

    assert [target for target in targets if not leads_somewhere(page, target)] == []


@each_page
def test_every_reference_has_one_definition_and_every_definition_is_used(page: Path) -> None:
    used = set(re.findall(r"\]\[([^\]]+)\]", text(page)))
    defined = [name for name, _ in definitions(page)]

    assert used - set(defined) == set(), "define it"
    assert set(defined) - used == set(), "use it, or leave it out"
    assert len(defined) == len(set(defined)), f"one of each: {sorted(defined)}"
