"""The package serves, trains and draws the demo without a clone.

Run by hand with `make package-check`: the demo runs twice, from the package and from the clone.
"""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.harness.packages import (
    ROOT,
    UV,
    Environment,
    an_environment,
    an_index,
    build,
    locked,
)
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.small_models.models import save, smollm2, tiny_llama

pytestmark = pytest.mark.timeout(3600)

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TUTORIAL = ROOT / "docs" / "use" / "tutorial.md"
KEY = "tml-key-of-the-package-check"


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the locked versions: with those, the environment computes what the clone computes."""
    return locked(tmp_path_factory.mktemp("locked") / "constraints.txt")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    packages = build(tmp_path_factory.mktemp("dist"))
    with an_index(packages, tmp_path_factory.mktemp("index")) as url:
        yield url


@pytest.fixture(scope="module")
def environment(
    index: str, constraints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    made = an_environment(tmp_path_factory.mktemp("machine"))
    options = ("--index", index, "--constraints", str(constraints))
    made.uv_pip("install", *options, "tinkercloud[demo]")
    return made


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def serving(environment: Environment, name: str, folder: Path) -> Iterator[str]:
    """Serve a model with the `tinkercloud` command of an environment; yields the server's URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        environment.command(
            "tinkercloud", "serve", "--port", str(port), "--model", f"{name}={folder}"
        ),
        cwd=environment.home,
        env={**environment.variables, "TINKERCLOUD_BOOTSTRAP_KEY": KEY},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: is_healthy(url), "the server")
            yield url
        finally:
            process.terminate()


def plot_of_the_demo(environment: Environment) -> bytes:
    with serving(environment, MODEL, smollm2()) as url:
        shown = environment.run("tinkercloud", "demo", "--base-url", url, TINKER_API_KEY=KEY)
    sys.stdout.write(shown.stdout)
    assert shown.returncode == 0, shown.stderr
    assert "identical losses" in shown.stdout
    assert "no restart" not in shown.stdout
    return (environment.home / "demo-results.png").read_bytes()


def test_nothing_comes_from_the_source_tree(environment: Environment) -> None:
    code = "import tinkercloud_api as a, tinkercloud_worker as w; print(a.__file__, w.__file__)"

    found = environment.run("python", "-c", code).stdout.split()

    assert len(found) == 2
    assert all(Path(path).is_relative_to(environment.prefix) for path in found)


def test_the_doctor_finds_the_session_head_and_the_catalog(environment: Environment) -> None:
    found = environment.run("tinkercloud", "doctor", "--json")

    checks = {each["check"]: each["result"] for each in json.loads(found.stdout)}
    assert checks["session head"] == checks["catalog"] == checks["device"] == "ok"


def test_uvx_finds_the_command_in_the_package(
    index: str, constraints: Path, tmp_path: Path
) -> None:
    command = [str(UV), "tool", "run", "--no-config", "--index", index, "--python", sys.executable]
    command += ["--constraints", str(constraints), "tinkercloud", "--version"]

    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert shown.stdout.startswith("tinkercloud "), shown.stderr


def test_the_tutorial_runs_as_it_is_written(environment: Environment, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S))
    folder = save(tiny_llama(), tmp_path / "llama")

    with serving(environment, "tiny/llama", folder) as url:
        ran = environment.run(
            *("python", "-c", code),
            TINKER_BASE_URL=url,
            TINKER_API_KEY=KEY,
            HF_ENDPOINT=f"{url}/hf",
            MODEL="tiny/llama",
            MPLBACKEND="Agg",
        )

    assert ran.returncode == 0, ran.stderr
    assert (environment.home / "tutorial.png").stat().st_size > 10_000


def test_the_demo_of_the_package_draws_the_curves_of_the_clone(
    environment: Environment, tmp_path: Path
) -> None:
    clone = Environment(Path(sys.prefix), tmp_path)

    assert plot_of_the_demo(environment) == plot_of_the_demo(clone)


def test_uninstalling_leaves_only_the_state_folder(environment: Environment) -> None:
    names = {
        path.name.partition("-")[0] for path in site(environment).glob("tinkercloud*dist-info")
    }
    environment.run("tinkercloud", "doctor")

    environment.uv_pip("uninstall", *sorted(names))

    assert len(names) > 5
    assert list(site(environment).glob("tinkercloud*")) == []
    assert not (environment.prefix / "bin" / "tinkercloud").exists()
    assert [path.name for path in (environment.home / "data").iterdir()] == ["tinkercloud"]


def site(environment: Environment) -> Path:
    (folder,) = environment.prefix.glob("lib/python*/site-packages")
    return folder
