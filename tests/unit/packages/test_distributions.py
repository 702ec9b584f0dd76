"""What the wheels and source distributions contain, and what they require."""

import email
import re
import tarfile
import zipfile
from collections.abc import Mapping
from email.message import Message
from pathlib import Path

import pytest

from tinkercloud_testing.harness.packages import ROOT, build

FOLDERS = sorted(path.parent for path in ROOT.glob("*/pyproject.toml"))
COMMAND = "tinkercloud = tinkercloud_api.entry:main"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheels(packages: Path) -> Mapping[str, zipfile.ZipFile]:
    """Return the wheels by the names of their distributions."""
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in packages.glob("*.whl")}


def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(of_distribution(wheel, "METADATA"))


def of_distribution(wheel: zipfile.ZipFile, name: str) -> bytes:
    (found,) = (each for each in wheel.namelist() if each.endswith(f".dist-info/{name}"))
    return wheel.read(found)


def modules_of(name: str) -> set[str]:
    """Return all files of a package's source folder, as a wheel names them."""
    (source,) = ROOT.glob(f"*/src/{name}")
    files = (path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(source.parent)) for path in files}


def test_every_package_of_the_workspace_has_a_wheel_and_a_source_distribution(
    packages: Path,
) -> None:
    wheels = {path.name.split("-")[0] for path in packages.glob("*.whl")}
    sources = {path.name.split("-")[0] for path in packages.glob("*.tar.gz")}

    assert wheels == sources
    assert len(wheels) == len(FOLDERS)
    assert "tinkercloud" in wheels


def test_a_wheel_contains_all_files_of_its_package_its_types_and_its_licence(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    for name, wheel in wheels.items():
        inside = set(wheel.namelist())

        assert modules_of(name) <= inside, name
        assert f"{name}/py.typed" in inside
        assert of_distribution(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes(), name


def test_the_catalog_s_migrations_are_in_the_wheel_of_the_api_server(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    migrations = "tinkercloud_api/catalog/migrations"
    inside = wheels["tinkercloud_api"].namelist()

    assert f"{migrations}/env.py" in inside
    assert [name for name in inside if re.fullmatch(f"{migrations}/versions/[^_].*\\.py", name)]


def test_a_source_distribution_contains_its_licence_as_a_file(packages: Path) -> None:
    for path in packages.glob("*.tar.gz"):
        with tarfile.open(path) as opened:
            (licence,) = (each for each in opened if each.name.partition("/")[2] == "LICENSE")

            assert licence.isfile(), path.name


def test_our_packages_require_each_other_in_exactly_their_own_version(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    found = 0
    for name, wheel in wheels.items():
        described = metadata(wheel)
        for line in described.get_all("Requires-Dist", []):
            if line.startswith("tinkercloud"):
                found += 1
                assert f"=={described['Version']}" in line, f"{name} requires {line}"
    assert found > 15


def test_all_packages_accept_the_same_versions_of_python(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    accepted = {
        frozenset(metadata(wheel)["Requires-Python"].split(",")) for wheel in wheels.values()
    }

    assert accepted == {frozenset({">=3.11", "<3.14"})}


def test_the_command_is_in_the_package_that_users_name_and_in_the_api_server_s(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    having = {
        name
        for name, wheel in wheels.items()
        if any(each.endswith("entry_points.txt") for each in wheel.namelist())
    }

    assert having == {"tinkercloud", "tinkercloud_api"}
    for name in having:
        assert COMMAND in of_distribution(wheels[name], "entry_points.txt").decode()


def test_the_extras_of_the_package_reach_those_of_its_parts(
    wheels: Mapping[str, zipfile.ZipFile],
) -> None:
    described = metadata(wheels["tinkercloud"])
    required = " ".join(described.get_all("Requires-Dist", []))

    assert described.get_all("Provides-Extra") == [
        "demo",
        "gpu",
        "megatron",
        "notebook",
        "postgres",
        "programs",
        "sdk",
        "telemetry",
    ]
    of_api, of_worker = ("postgres", "sdk", "telemetry"), ("gpu", "megatron", "telemetry")
    extras = [f"api[{extra}]" for extra in of_api] + [f"worker[{extra}]" for extra in of_worker]
    for part in (*extras, "programs"):
        assert f"tinkercloud-{part}==" in required
