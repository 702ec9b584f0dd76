"""The notebook of the tutorial runs in Jupyter, with the packages of the extra `notebook`."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import Server

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "distribution" / "pyproject.toml"


@pytest.fixture
def jupyter(tmp_path: Path) -> Path:
    """Install the extra into an environment that has all other packages of this one."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    folder, uv = tmp_path / "venv", str(ROOT / ".uv" / "bin" / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    lab = [each for each in extras["notebook"] if each.startswith("jupyterlab")]
    install = [uv, "pip", "install", "--no-config", "--quiet", "--python", str(folder)]
    subprocess.run([*install, *lab], check=True)
    return folder / "bin" / "jupyter"


@pytest.mark.long
def test_all_cells_of_the_notebook_run_in_jupyter(
    server: Server, jupyter: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(ROOT / "examples" / "tutorial.ipynb", tmp_path))

    ran = subprocess.run(
        [str(jupyter), "execute", "--inplace", copy.name],
        env={
            **os.environ,
            **server.environment_of_recipes(tmp_path),
            "MODEL": "tiny/llama",
            "PATH": f"{jupyter.parent}:{os.environ['PATH']}",
            "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-4000:]
    cells = [each for each in json.loads(copy.read_text())["cells"] if each["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell["outputs"])
