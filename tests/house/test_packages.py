"""Each program installs and imports only the packages it needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "protobuf", "tinker", "torch", "transformers"}
"""Packages that only training and sampling need."""


def installed(package: str, *options: str) -> set[str]:
    """Return the names of the locked dependencies of a workspace package."""
    command = [str(ROOT / ".uv" / "bin" / "uv"), "export", "--frozen", "--offline", "--quiet"]
    command += ["--no-default-groups", "--no-emit-workspace", "--no-hashes", "--no-annotate"]
    exported = subprocess.check_output(
        [*command, "--no-header", "--package", package, *options], text=True, cwd=ROOT
    )
    return set(re.findall(r"^([A-Za-z0-9._-]+)==", exported, re.MULTILINE))


@pytest.mark.parametrize("package", ["tinkercloud-operator", "tinkercloud-api"])
def test_the_control_plane_installs_no_tensor_library_and_no_sdk(package: str) -> None:
    names = installed(package)

    assert "pydantic" in names
    assert names & HEAVY == set()


def test_the_image_of_the_api_server_contains_the_sdk_for_helm_test() -> None:
    assert "tinker" in installed("tinkercloud-api", "--extra", "sdk")


def test_the_worker_installs_what_training_payloads_need() -> None:
    assert installed("tinkercloud-worker") >= HEAVY - {"tinker"}


@pytest.mark.parametrize("package", ["tinkercloud-worker", "tinkercloud-protocol"])
def test_no_program_of_a_session_installs_the_sdk(package: str) -> None:
    assert "tinker" not in installed(package, "--all-extras")


@pytest.mark.parametrize("folder", ["protocol", "worker_image", "kube", "operator", "planning"])
def test_no_module_of_a_program_imports_the_sdk(folder: str) -> None:
    imports = re.compile(r"^\s*(?:import|from) tinker\b", re.MULTILINE)
    sources = list((ROOT / folder / "src").rglob("*.py"))

    assert sources
    assert [path.name for path in sources if imports.search(path.read_text())] == []


@pytest.mark.parametrize("package", ["tinkercloud_operator", "tinkercloud_planning"])
def test_no_module_of_the_control_plane_imports_a_tensor_library(package: str) -> None:
    script = f"""
import importlib, pkgutil, sys, {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(*sys.modules)
"""
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True)

    assert set(loaded.split()) & HEAVY == set()


def test_the_command_line_loads_the_server_and_clusters_only_for_the_commands_that_need_them() -> (
    None
):
    script = "import sys, tinkercloud_api.cli; print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-c", script], text=True)

    slow = {
        "fastapi",
        "kubernetes",
        "huggingface_hub",
        "uvicorn",
        "tinkercloud_api.serve.run_server",
    }
    assert set(loaded.split()) & slow == set()


def test_the_version_is_printed_without_loading_any_other_package() -> None:
    script = """
import sys
sys.argv = ["tinkercloud", "--version"]
from tinkercloud_api.entry import main
main()
print(*sys.modules)
"""
    printed, loaded = subprocess.check_output(
        [sys.executable, "-S", "-c", script],
        text=True,
        # Without `site`, which loads what other packages ask for at every start.
        env={"PYTHONPATH": ":".join(sys.path)},
    ).splitlines()

    assert re.fullmatch(r"tinkercloud [0-9.]+", printed)
    ours = {name for name in loaded.split() if name.startswith("tinkercloud")}
    small = {"entry", "lasting_objects", "process_start", "version_line"}
    assert ours == {"tinkercloud_api", *(f"tinkercloud_api.{name}" for name in small)}
    slow = {"aiohttp", "fastapi", "kubernetes", "pydantic", "rich", "sqlalchemy", "torch", "typer"}
    assert set(loaded.split()) & slow == set()
