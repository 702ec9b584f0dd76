"""The workflows of the public host: they call the Makefile, with pinned actions and few rights."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
RIGHTS = {
    "release/packages": {"id-token", "attestations"},
    "release/images": {"packages", "id-token", "attestations"},
    "release/pypi": {"id-token"},
    "release/github": {"contents"},
}
"""What jobs may write; all others only read the repository."""
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
notes = runpy.run_path(str(ROOT / "tools" / "release" / "notes.py"))["notes"]


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


@each_workflow
def test_every_command_of_a_workflow_that_runs_make_names_a_target(path: Path) -> None:
    steps = [step for job in jobs(path).values() for step in job.get("steps", [])]
    commands = [step["run"] for step in steps if re.search(r"\bmake\b", step.get("run", ""))]
    named = [
        word
        for command in commands
        for words in re.findall(r"\bmake((?: [a-z-]+\b(?!=))+)", command)
        for word in words.split()
    ]

    assert named
    assert set(named) <= TARGETS


@each_workflow
def test_every_action_is_pinned_by_the_commit_of_a_tag(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    foreign = [(name, comment) for name, comment in used if not name.startswith("./")]

    assert foreign
    for name, comment in foreign:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), name
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), name


@each_workflow
def test_jobs_write_only_what_they_must_and_end_in_time(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        rights = job.get("permissions", {})
        written = {right for right, level in rights.items() if level == "write"}
        assert written == RIGHTS.get(f"{path.stem}/{name}", set()), name
        assert "uses" in job or job["timeout-minutes"] <= 180, name


@each_workflow
def test_no_checkout_leaves_credentials_for_later_steps(path: Path) -> None:
    steps = [step for job in jobs(path).values() for step in job.get("steps", [])]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]

    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_release_is_published_only_after_all_tests() -> None:
    found = jobs(ROOT / ".github" / "workflows" / "release.yml")

    assert found["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert found["packages"]["needs"] == found["images"]["needs"] == "ci"
    assert found["pypi"]["needs"] == ["packages", "images"]
    assert found["github"]["needs"] == "pypi"


CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-01)\n\n- B\n\n## 0.1.0\n\n### X\n\n- A\n"
)


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    assert notes(CHANGELOG, "0.2.0") == "- B\n"
    assert notes(CHANGELOG, "0.1.0") == "### X\n\n- A\n"


@pytest.mark.parametrize("version", ["0.3.0", "0.1", "0.1.00"])
def test_a_release_without_a_section_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ValueError, match=rf"begins with `## {version}`; rename"):
        notes(CHANGELOG, version)
