"""`make test-fast` runs the tests that a change concerns."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "tools/changed_tests.py"
A_TEST = "def test_it() -> None: ...\n"
FILES = {
    "kube/src/ours/base.py": "",
    "kube/src/ours/middle.py": "from ours import (\n    base,\n)\n",
    "kube/src/ours/top.py": "import ours.middle\n",
    "kube/src/ours/entry.py": "from ours.top import run\n",
    "tests/conftest.py": "",
    "tests/support/helpers/clock.py": "",
    "tests/unit/time/conftest.py": "from helpers.clock import now\n",
    "tests/unit/time/test_times.py": A_TEST,
    "tests/unit/test_base.py": f"from ours.base import one\n{A_TEST}",
    "tests/unit/test_top.py": f"from ours.top import run\n{A_TEST}",
    "tests/unit/test_entry.py": f"from ours.entry import main\n{A_TEST}",
    "tests/unit/test_chart.py": f'FOLDER = "charts"\n{A_TEST}',
    "tests/conformance/test_server.py": A_TEST,
    "charts/values.yaml": "",
}


class Repository:
    """A repository with a copy of the program, whose main branch has FILES."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        (folder / "tools").mkdir()
        shutil.copy(PROGRAM, folder / "tools")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def git(self, *arguments: str) -> None:
        """Run git."""
        subprocess.run(["git", *arguments], cwd=self.folder, check=True)  # noqa: S607 - any git

    def commit(self) -> None:
        """Commit all files."""
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "All")

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def chosen(self) -> tuple[set[str], str]:
        """Return the tests that the program prints, without their folder, and its messages."""
        command = [sys.executable, "tools/changed_tests.py"]
        done = subprocess.run(command, cwd=self.folder, check=True, text=True, stdout=-1, stderr=-1)
        return {line.removeprefix("tests/unit/") for line in done.stdout.split()}, done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("kube/src/ours/base.py", {"test_base.py", "test_top.py"}),
        ("kube/src/ours/entry.py", {"test_entry.py"}),
        ("tests/support/helpers/clock.py", {"time/test_times.py"}),
        ("tests/unit/time/conftest.py", {"time/test_times.py"}),
        ("tests/unit/test_top.py", {"test_top.py"}),
        ("tests/unit/time/test_new.py", {"time/test_new.py"}),
        ("charts/values.yaml", {"test_chart.py"}),
        ("README.md", set()),
    ],
)
def test_tests_up_to_three_imports_away_from_a_change_run(
    repository: Repository, changed: str, tests: set[str]
) -> None:
    repository.write(changed, FILES.get(changed, "") + "\n# Changed\n")

    assert repository.chosen() == (tests, "")


def test_a_changed_conftest_of_all_tests_concerns_every_test(repository: Repository) -> None:
    repository.write("tests/conftest.py", "# Changed\n")

    chosen, _ = repository.chosen()

    assert len(chosen) == sum(name.startswith("tests/unit/") for name in FILES) - 1


def test_the_nearest_tests_run_if_a_change_concerns_too_many(repository: Repository) -> None:
    repository.write("tests/unit/test_middle.py", "from ours import middle\n" + A_TEST * 250)
    repository.commit()
    repository.write("kube/src/ours/middle.py", "# Changed\n")

    assert repository.chosen() == (
        {"test_middle.py"},
        "Not run: 2 test files that are farther away\n",
    )


def test_changed_tests_that_need_a_server_are_named(repository: Repository) -> None:
    repository.write("tests/conformance/test_server.py", "# Changed\n")

    chosen, messages = repository.chosen()

    assert chosen == set()
    assert messages == ("Not run, since they need more time: tests/conformance/test_server.py\n")
