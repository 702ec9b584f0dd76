"""Print the unit tests of what has changed since a commit: `changed_tests.py [BASE]`.

The base is main by default. A test belongs to a change if it changed itself, imports a changed
module of the product, of tests/support or of its conftest.py, or reads a changed folder without
modules, such as charts/. Imports count through other modules too: the nearest tests come first, up
to MAX_DISTANCE imports away and MAX_TESTS tests, which keeps `make test-fast` under two minutes on
two idle cores. What is left out is printed to stderr.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_DISTANCE = 3
"""How many imports there may be between a test and a change; most tests are four from anything."""
MAX_TESTS = 250
"""How many test functions are chosen, apart from those of files that changed themselves."""

IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (?:\(([^)]*)\)|(.*)))?", re.MULTILINE)
"""An import: read as text, since a parser would take a tenth of the time of the tests."""


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.check_output(command, text=True).splitlines()  # noqa: S603 - fixed commands


def changed_files(base: str) -> list[str]:
    """Return the files that differ from the common ancestor with a commit, new ones included."""
    [since] = git("merge-base", "HEAD", base)
    new = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", since), *new]


def name_of(file: str) -> str:
    """Return the module of a Python file of a package or of tests/support; its path for others."""
    for start in ("/src/", "tests/support/"):
        _, found, path = file.partition(start)
        if found:
            return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return file


def imports(source: str) -> Iterator[str]:
    """Yield the modules that a module imports, and the names that it imports from them."""
    for module, several, names in IMPORT.findall(source):
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", several or names))


def conftests(file: str) -> list[str]:
    """Return the paths that the conftest.py of a test may have, in its folder and those above."""
    return [str(folder / "conftest.py") for folder in Path(file).parents]


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return for each module which of the given files import it; tests import their conftest.py."""
    found = defaultdict(set)
    for file, source in sources.items():
        for name in (*imports(source), *(conftests(file) if "/test_" in file else ())):
            found[name].add(name_of(file))
    return found


def distances(changed: Iterable[str], users: Mapping[str, Set[str]]) -> dict[str, int]:
    """Return how many imports modules and tests are away from what changed: at least 0."""
    found = dict.fromkeys(map(name_of, changed), 0)
    latest = set(found)
    for distance in range(1, MAX_DISTANCE + 1):
        latest = {user for name in latest for user in users.get(name, ())} - found.keys()
        found.update(dict.fromkeys(latest, distance))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen test files, and the number of more distant ones that would take too long."""

    chosen: Sequence[str]
    left_out: int


def choose(changed: Sequence[str], sources: Mapping[str, str]) -> Choice:
    """Choose from the unit tests among the files; of equally near ones, those of few imports."""
    away = distances(changed, importers(sources))
    folders = {f'"{file.split("/")[0]}"' for file in changed if not file.endswith(".py")}
    tests = {file: text for file, text in sources.items() if file.startswith("tests/unit/")}
    for file, text in tests.items():
        if any(folder in text for folder in folders):
            away.setdefault(file, 2)
    near = [file for file in tests if "/test_" in file and file in away]
    chosen, count = [], 0
    for file in sorted(near, key=lambda each: (away[each], tests[each].count("import "), each)):
        count += tests[file].count("def test_") if away[file] else 0
        if count <= MAX_TESTS:
            chosen.append(file)
    return Choice(sorted(chosen), len(near) - len(chosen))


def main() -> None:
    """Print the paths of the tests, one on each line."""
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else "main")
    files = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    sources = {each: (ROOT / each).read_text() for each in files if (ROOT / each).exists()}
    choice = choose(changed, sources)
    others = [each for each in changed if re.search(r"^tests/(?!unit|house).*/test_", each)]
    if choice.left_out:
        print(f"Not run: {choice.left_out} test files that are farther away", file=sys.stderr)
    if others:
        print(f"Not run, since they need more time: {' '.join(others)}", file=sys.stderr)
    for file in choice.chosen:
        print(file)


if __name__ == "__main__":
    main()
