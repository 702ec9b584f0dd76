"""Code, messages, charts and pages are written in the plain English of the field.

Some words are refused everywhere: in names of files and identifiers, in strings, comments and
prose. There is no allow list. Every rule spells its words as `[t]old`, so that this file passes
its own test.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WRITE_INSTEAD = {
    r"le(t|ts|tting)_(\w+_)?go": "release, evict, remove, stop",
    r"(give|gives|given|gave|giving)_up": "cancel, time out, abandon, stop waiting",
    r"(un)?[t]old": "notified of, configured with, received, reported",
    r"[t]ells?_(an?|the|its?|them|each|every|nobody|heads?|of)": "notify, report, show",
    r"[a]new": "again, from scratch",
    r"for_[e]ver": "forever, indefinitely",
    r"[b]esides?": "alongside, in addition to, apart from",
    r"(made|makes?|begins?|began|[b]egun)_again": "recreated, restarted",
    r"(goes|go|went|gone|going)_on": "continue, resume, proceed, happen",
    r"who(so)?[e]ver": "any caller, everyone who",
    r"[w]homever": "anyone whom",
    r"[b]egun": "started",
    r"is_n[o]_more(?=[.,;:\n]|$)": "is gone, was deleted",
    r"at_[b]irth": "at startup, on creation",
    r"there_is_no_[s]uch": "not found, unknown",
    r"[w]hatsoever": "at all",
    r"[h]itherto": "until now",
    r"[o]bituar(y|ies)": "the error of a lost run",
    r"[m]istrust(ed|s|ing)?": "invalidate",
    r"nobody_[g]ives": "without an owner, unset",
    r"without_[e]nd": "endless, unbounded",
    r"what_[o]f": "which",
    r"[n]ought|n[a]ught": "zero, nothing",
    r"by_itself_[a]lone": "alone",
    r"[p]layed": "simulated",
    r"[k]in|[k]insfolk": "matching, related",
    r"[d]eaf": "stalled, unresponsive",
    r"[w]itness(es|ed)?": "marker, tracker",
    r"[w]hence|[t]hence|[w]hither|[t]hither": "from where, to where",
    r"[l]est": "so that ... not",
    r"[t]hereof|[t]hereupon|[w]hereof|[w]hereupon|[h]eretofore": "of it, then, before",
    r"[b]etwixt|[u]nto|[a]ught|[f]orthwith|[b]ereft|[h]enceforth": "an everyday word",
}
"""A pattern of refused words, `_` standing for any space between two; what to write instead."""

TEXT = re.compile(
    r"\.(py|md|ya?ml|tpl|toml|sh|sql|txt|go|mako|html|json|ipynb|mmd|dot|importlinter)$"
    r"|(^|/)(Makefile|Dockerfile(\.\w+)?|run)$"
)
OTHERS_WROTE = ("uv.lock", "tools/cluster/kube", "benchmarks/results/")
"""Lock files and pins of dependencies, and output of measurements."""


def _compiled() -> re.Pattern[str]:
    rules = (
        f"(?P<rule{number}>{words.replace('_', '[ _-]+')})"
        for number, words in enumerate(WRITE_INSTEAD)
    )
    return re.compile(rf"(?<![a-z])(?:{'|'.join(rules)})(?![a-z])")


REFUSED = _compiled()
ADVICE = list(WRITE_INSTEAD.values())
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def refused_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each refused word, and what to write instead."""
    # Identifiers in camel case are split into words first.
    plain = CAMEL.sub("_", text).lower()
    for found in REFUSED.finditer(plain):
        line = plain.count("\n", 0, found.start()) + 1
        number = int(str(found.lastgroup).removeprefix("rule"))
        yield line, f"'{found.group()}': write {ADVICE[number]}"


_CONFLICT = ("<" * 7 + " ", ">" * 7 + " ")
"""What Git writes around a conflict."""


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each docstring that begins with 'Of'."""
    if not re.search(r'"""\s*Of\b', source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if re.match(r"\s*Of\b", text):
                yield node.lineno, "a docstring that begins with 'Of': write a full sentence"
            case _:
                pass


def files() -> list[Path]:
    """Return the text files of the repository that people of this project write."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [
        ROOT / name
        for name in sorted(set(names))
        if TEXT.search(name) and not name.startswith(OTHERS_WROTE) and (ROOT / name).is_file()
    ]


def findings(path: Path) -> Iterator[str]:
    """Yield each offence of a file, by its name or its text."""
    name = str(path.relative_to(ROOT))
    for _, advice in refused_words(name):
        yield f"{name}: {advice} in the name of the file"
    text = path.read_text()
    for line, advice in refused_words(text):
        yield f"{name}:{line}: {advice}"
    for number, content in enumerate(text.splitlines(), 1):
        if content.startswith(_CONFLICT):
            yield f"{name}:{number}: a merge conflict that nobody has resolved"
    if path.suffix == ".py":
        for line, advice in fragments(text):
            yield f"{name}:{line}: {advice}"


def test_every_file_is_written_in_plain_english() -> None:
    found = [finding for path in files() for finding in findings(path)]

    if found:
        pytest.fail("\n".join(["docs/glossary.md lists the terms to use:", *found]), pytrace=False)


@pytest.mark.parametrize(
    "text",
    [
        "the run was l|et go",
        "def l|et_runs_go() -> None:",
        "class L|etGo:",
        "a request that was g|iven up",
        "HEAD_T|OLD = 1",
        "class HeadT|old:",
        "t|ell the head",
        "an object that is m|ade again",
        "training g|oes on",
        "- b|eside the head",
        "w|hoever asks",
        "# the pod is n|o more.",
    ],
)
def test_a_refused_word_is_found_in_prose_and_in_identifiers(text: str) -> None:
    assert len(list(refused_words(text.replace("|", "")))) == 1


@pytest.mark.parametrize("text", ["goes one step", "long ago", "is no more than 3", "the kind"])
def test_ordinary_words_are_accepted(text: str) -> None:
    assert list(refused_words(text)) == []


def test_the_line_and_the_advice_are_named() -> None:
    [(line, advice)] = refused_words("one\ntwo for" + " ever\n")

    assert line == 2
    assert advice.endswith("write forever, indefinitely")


def test_a_docstring_that_begins_with_of_is_a_fragment() -> None:
    assert [line for line, _ in fragments('x = 1\n"""Of' + ' the model."""\n')] == [2]
    assert list(fragments('"""Offers nodes."""\ny = "Of"\n')) == []
