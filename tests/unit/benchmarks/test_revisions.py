"""Results contain the commit that was measured."""

import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


@pytest.fixture
def revision(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, object]]:
    """Make `benchmarks` importable, which is not an installed package."""
    monkeypatch.syspath_prepend(ROOT)
    found: Callable[[Path], dict[str, object]] = import_module(
        "benchmarks.shared.measuring"
    ).revision
    return found


def git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output([*GIT, *arguments], cwd=folder, text=True).strip()


def test_a_clone_is_identified_by_its_commit_and_is_dirty_with_changed_or_new_files(
    tmp_path: Path, revision: Callable[[Path], dict[str, object]]
) -> None:
    (tmp_path / "code.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Something")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "gpu.json").write_text("{}")
    commit = git(tmp_path, "rev-parse", "HEAD")

    clean = revision(tmp_path)
    (tmp_path / "code.py").write_text("changed")
    changed = revision(tmp_path)
    git(tmp_path, "checkout", "-q", "code.py")
    (tmp_path / "new.py").write_text("")
    new = revision(tmp_path)

    assert clean == {"commit": commit, "dirty": False}
    assert changed == new == {"commit": commit, "dirty": True}


def test_a_folder_outside_a_clone_or_without_git_has_no_revision(
    tmp_path: Path,
    revision: Callable[[Path], dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neither = {"commit": None, "dirty": None}
    copied = tmp_path / "copied"
    copied.mkdir()

    assert revision(copied) == neither
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Another project")
    assert revision(copied) == neither
    monkeypatch.setenv("PATH", str(copied))
    assert revision(tmp_path) == neither
