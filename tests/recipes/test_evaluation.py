"""The commands of the page about own data that evaluate a model and log its curves.

Run by hand with `make test-recipes`: the packages are installed into an environment of their own.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use" / "own-data.md").read_text()
MODEL = "tiny/llama"
UV = ROOT / ".uv" / "bin" / "uv"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with a tiny model that has a chat template."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty Python environment."""
    folder = tmp_path_factory.mktemp("evaluation") / "environment"
    subprocess.run([UV, "venv", "--quiet", folder], check=True)
    return folder


def section(title: str) -> str:
    """Return a section of the page."""
    [found] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return str(found)


def commands(text: str) -> str:
    """Return the commands of the console blocks of a text as a script."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    script = re.sub(r"^\$ ", "", "".join(blocks), flags=re.M)
    return script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", MODEL)


def run(script: str, server: Server, environment: Path, folder: Path) -> str:
    """Run a script in a folder, whose `pip` installs into the environment; return its output."""
    pip = f'pip() {{ shift; "{UV}" pip install --quiet --python "{environment}" "$@"; }}\n'
    result = subprocess.run(
        ["/bin/bash", "-euc", pip + script],
        cwd=folder,
        env={
            **os.environ,
            **server.environment_of_recipes(folder),
            "PATH": f"{environment}/bin:{os.environ['PATH']}",
            "WANDB_MODE": "offline",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_both_harnesses_evaluate_the_questions_of_the_page(
    server: Server, environment: Path, tmp_path: Path
) -> None:
    output = run(commands(section("Evaluation")), server, environment, tmp_path)

    assert re.search(r"\|questions\|.*\|acc ", output)
    assert re.search(r"^accuracy +[01]\.", output, re.M)


def test_the_curves_are_in_mlflow_and_wandb(
    server: Server, environment: Path, tmp_path: Path
) -> None:
    text = section("Curves in MLflow and wandb")
    [program] = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "curves.py").write_text(program)

    run("pip install mlflow wandb\npython curves.py", server, environment, tmp_path)

    assert (tmp_path / "mlflow.db").exists()
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]
