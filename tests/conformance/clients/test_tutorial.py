"""The tutorial runs as it is written, as a page and as a notebook; so does the quickstart."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import API_KEY, Server

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "use" / "tutorial.md"
QUICKSTART = ROOT / "docs" / "operate" / "quickstart.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def code_of_the_page(page: Path = PAGE) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))


def code_of_the_notebook() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code_of_the_page(), id="page"),
        pytest.param(code_of_the_notebook(), id="book", marks=pytest.mark.long),
    ],
)
def test_the_tutorial_lowers_the_loss_raises_the_reward_and_draws_both(
    server: Server, tmp_path: Path, code: str
) -> None:
    report = "\nimport json; print(json.dumps([losses[0], losses[-1], rewards[0], rewards[-1]]))"
    printed = run(code + report, server, tmp_path)

    first_loss, last_loss, first_reward, last_reward = json.loads(printed.splitlines()[-1])
    assert last_loss < 0.9 * first_loss
    assert last_reward > first_reward
    assert (tmp_path / "tutorial.png").stat().st_size > 10_000


def test_the_program_of_the_quickstart_page_lowers_the_loss(server: Server, tmp_path: Path) -> None:
    printed = run(code_of_the_page(QUICKSTART), server, tmp_path)

    steps = re.findall(r"^step (\d): loss ([0-9.]+)$", printed, re.M)
    assert [number for number, _ in steps] == ["0", "9"]
    assert float(steps[1][1]) < float(steps[0][1])


def run(code: str, server: Server, folder: Path) -> str:
    """Run a program as a user of the server, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "HF_ENDPOINT": f"{server.url}/hf",
            "HF_HOME": str(folder / "hf"),
            "MODEL": "tiny/llama",
            "MPLBACKEND": "Agg",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
