"""Sentences of the pages are short enough to be read once."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 40
GENERATED = {"docs/operate/configuration.md"}
"""Pages whose sentences are those of docstrings."""
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if str(path.relative_to(ROOT)) not in GENERATED
]
NEW_BLOCK = re.compile(r"\s*(?:[-*] |\d+\. |#|>|$)")
END_OF_SENTENCE = re.compile(r"(?<=[.?!:])[\"*)]*\s+(?=[A-Z`*\[\"(])")


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page; a list item and a cell of a table end one, code has none."""
    page = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    blocks: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.lstrip().startswith("|"):
            blocks += [[cell] for cell in line.split("|")]
        elif NEW_BLOCK.match(line) or not blocks[-1]:
            blocks.append([line])
        else:
            blocks[-1].append(line)
    for block in blocks:
        yield from END_OF_SENTENCE.split(" ".join(block))


def too_long(page: str) -> list[str]:
    """Return the sentences of a page that have more words than allowed."""
    return [each.strip() for each in sentences(page) if len(each.split()) > MAX_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_is_too_long(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_a_long_sentence_is_found_across_lines_and_in_a_cell() -> None:
    words = "word " * MAX_WORDS

    assert len(too_long(f"One {words}\nmore.")) == 1
    assert len(too_long(f"| short | one {words} |")) == 1


def test_items_cells_and_code_are_not_one_sentence() -> None:
    half = "word " * (MAX_WORDS // 2)
    page = f"{half}\n- {half}\n- {half}\n\n| {half} | {half} |\n\n```\n{half}{half}{half}\n```\n"

    assert too_long(page) == []


def wordy_entries(changelog: str) -> list[str]:
    """Return the entries of more than two sentences, apart from links at the end."""
    items = re.findall(r"^- .*(?:\n  .*)*", changelog, re.MULTILINE)
    entries = [" ".join(item.removeprefix("- ").split()) for item in items]
    return [each for each in entries if len(re.findall(r"[.?!] (?=[A-Z`])", each)) > 1]


def test_an_entry_of_the_changelog_has_at_most_two_sentences() -> None:
    assert wordy_entries((ROOT / "CHANGELOG.md").read_text()) == []


def test_an_entry_of_three_sentences_is_found() -> None:
    assert wordy_entries("- One. Two. [Link](a.md).\n- One.\n  Two. `Three` is it.\n") == [
        "One. Two. `Three` is it."
    ]
