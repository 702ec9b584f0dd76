"""`pip install tinkercloud-api`: the command without torch, which names what it lacks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.harness.packages import (
    Environment,
    an_environment,
    an_index,
    build,
    locked,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("machine")
    packages = build(tmp_path_factory.mktemp("dist"))
    made = an_environment(folder)
    with an_index(packages, tmp_path_factory.mktemp("index")) as index:
        constraints = locked(folder / "constraints.txt")
        options = ("--index", index, "--constraints", str(constraints))
        made.uv_pip("install", *options, "tinkercloud-api")
        yield made


def test_the_command_of_the_api_server_alone_works_and_comes_from_its_wheel(
    environment: Environment,
) -> None:
    shown = environment.run("tinkercloud", "--version")
    found = environment.run(
        "python", "-c", "import tinkercloud_api; print(tinkercloud_api.__file__)"
    )

    assert shown.stdout.startswith("tinkercloud "), shown.stderr
    assert Path(found.stdout.strip()).is_relative_to(environment.prefix)


def test_a_key_is_created_with_the_migrations_of_the_wheel(environment: Environment) -> None:
    made = environment.run("tinkercloud", "keys", "create", "me", "--json")

    assert json.loads(made.stdout)["owner"] == "me", made.stderr


def test_the_demo_names_what_is_not_installed_and_how_to_install_it(
    environment: Environment,
) -> None:
    refused = environment.run("tinkercloud", "demo")

    assert refused.returncode == 1
    assert " ".join(refused.stderr.split()) == (
        "error: demo: not installed: tinkercloud, tinker, matplotlib; install them with `pip"
        " install 'tinkercloud[demo]'`, or with `uv tool install 'tinkercloud[demo]'`"
    )


def test_a_model_is_not_served_without_the_packages_of_heads(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")

    refused = environment.run("tinkercloud", "serve", "--model", f"tiny/llama={tmp_path}")

    assert refused.returncode == 1
    # On a busy machine, lines before it say what takes so long.
    assert " ".join(refused.stderr.split()).endswith(
        "error: session heads: not installed: tinkercloud_worker, torch, transformers; install"
        " them with `pip install tinkercloud`"
    )


def test_a_catalog_in_postgresql_needs_its_extra(environment: Environment) -> None:
    url = "postgresql+asyncpg://me:secret@127.0.0.1:1/catalog"

    refused = environment.run("tinkercloud", "keys", "list", TINKERCLOUD_DATABASE_URL=url)

    assert refused.returncode == 1
    assert "`pip install 'tinkercloud[postgres]'`" in " ".join(refused.stderr.split())
    assert "secret" not in refused.stderr
