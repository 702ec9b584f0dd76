"""Print the unit tests of what has changed since a commit: `changed_tests.py [BASE]`.

The base is main by default. A test belongs to a change if it changed itself, imports a changed
module, or reads a changed folder without modules, such as charts/.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.check_output(command, text=True).splitlines()  # noqa: S603 - fixed commands


def changed_files(base: str) -> list[str]:
    """Return the files that differ from the common ancestor with a commit, new ones included."""
    [since] = git("merge-base", "HEAD", base)
    new = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", since), *new]


def module_of(file: str) -> str | None:
    """Return the module of a Python file of a package or of the tests' support; None for others."""
    for start in ("/src/", "tests/support/"):
        _, found, path = file.partition(start)
        if found and path.endswith(".py"):
            return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return None


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports, and the names that it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> None:
    """Print the paths of the tests, one on each line."""
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else "main")
    modules = {name for file in changed if (name := module_of(file)) is not None}
    folders = {f'"{file.split("/")[0]}"' for file in changed if not file.endswith(".py")}
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_text()
        reads = any(folder in source for folder in folders)
        if name in changed or reads or modules.intersection(imports(ast.parse(source))):
            print(name)


main()
