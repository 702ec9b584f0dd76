"""One command changes the version everywhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_testing.resources.charts import ROOT

OTHER = "97.98.99"
OF_OTHERS = {"go.mod", "go.sum"}
"""Files that name versions of dependencies."""
OF_RELEASES = {
    ".github/ISSUE_TEMPLATE/bug.yml",
    ".github/workflows/release.yml",
    "CHANGELOG.md",
    "UPGRADING.md",
    "api_server/src/tinkercloud_api/catalog/schema/connection.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_chain_and_storage.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_console.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_groups.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_indexes.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_newest.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_samples.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_session_keys.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_search.py",
    "api_server/src/tinkercloud_api/catalog/migrations/versions/v0_1_0_stops.py",
    "docs/compatibility.md",
    "docs/operate/upgrades.md",
    "protocol/src/tinkercloud_protocol/heads/launch.py",
    "protocol/src/tinkercloud_protocol/heads/releases.py",
    "tools/compatibility/releases.yaml",
}
"""Files that name releases that were made, or one as an example. So do tests."""


def version() -> str:
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def set_version(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/version.py", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(rf"(?<![\d.]){word}(?![\d.])", line)]


def locked_by_others(text: str) -> str:
    """Return a uv.lock without our packages."""
    return "\n".join(
        part for part in text.split("[[package]]") if '\nname = "tinkercloud' not in part
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clone")
    command = ["git", "grep", "-lFI", "--untracked", "-e", version()]
    named = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in [*named.splitlines(), "tools/version.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def test_a_new_version_reaches_every_file_that_names_it(copy: Path) -> None:
    changed = set_version(copy, OTHER)

    assert changed.returncode == 0, changed.stderr
    old = re.escape(version())
    left = {}
    for path in filter(Path.is_file, copy.rglob("*")):
        name = str(path.relative_to(copy))
        if path.name in OF_OTHERS or name in OF_RELEASES or name.startswith("tests/"):
            continue
        text = path.read_text()
        kept = lines_with(text, old)
        if path.name == "uv.lock":
            kept = [line for line in kept if line not in locked_by_others(text).splitlines()]
        if kept:
            left[name] = kept
    assert left == {}
    assert f'"tinkercloud-protocol=={OTHER}"' in (copy / "planning/pyproject.toml").read_text()
    assert set_version(copy, "--check").returncode == 0


@pytest.mark.parametrize("name", ["kube/pyproject.toml", "charts/tinkercloud-crds/Chart.yaml"])
def test_a_file_with_another_version_is_named(copy: Path, name: str) -> None:
    set_version(copy, OTHER)
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace(OTHER, "1.1.1"))

    checked = set_version(copy, "--check")

    (copy / name).write_text(text)
    assert checked.returncode == 1
    assert checked.stderr.strip() == (f"not version {OTHER}: {name}; run `python tools/version.py`")


@pytest.mark.parametrize("text", ["1.2", "v1.2.3", "1.2.3rc1", "1.2.3-rc.1"])
def test_a_version_that_helm_and_python_spell_differently_is_refused(copy: Path, text: str) -> None:
    refused = set_version(copy, text)

    assert refused.returncode == 1
    assert "a version of three numbers" in refused.stderr


def test_a_version_that_is_taken_back_leaves_the_lock_as_it_was(copy: Path) -> None:
    set_version(copy, OTHER)

    assert set_version(copy, version()).returncode == 0
    assert (copy / "uv.lock").read_text() == (ROOT / "uv.lock").read_text()
