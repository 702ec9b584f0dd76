"""`python -m benchmarks.gpu` succeeds even without a GPU, and lists what it has skipped.

Its figures are meaningless here. These tests check that it measures everything, and verifies the
results of the engine.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
ABSENT = {"vllm", "several GPUs"}
MEGATRON = {*(f"M{number}" for number in range(1, 9)), "G1m", "G2m"}
MEMORY = {"G6", *(f"P{number}" for number in range(1, 11))}
IMAGES = {"N8"}
NEED_PEFT = {"G4", "G5"}
SERVED = {f"S{number}" for number in range(1, 31) if number not in {15, 24, 28}}
"""Figures that need an external server."""
EVERY_FIGURE = {
    *("N1", "N2", "N3", "N4", "N5", "N6", "N7", "N8"),
    *("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G10"),
    *("G11a", "G11b", "G12", "G13", "G14", "G15", "G16", "G17"),
    *MEGATRON,
    *MEMORY,
}
SPOILING = """
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer

exported = MegatronTrainer.export_gradient

def spoilt(self, model_id):
    gradient = dict(exported(self, model_id))
    last = sorted(gradient)[-1]
    return {**gradient, last: gradient[last] * float("nan")}

MegatronTrainer.export_gradient = spoilt
"""
"""Makes one tensor of the gradient, not the first, NaN."""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that executes the code of `program` first."""
    command = f"{program}\nimport sys\nfrom benchmarks.gpu.__main__ import main\nsys.exit(main())"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    return subprocess.run(
        [sys.executable, "-c", command, "--size", "tiny", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )


def results(out: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Return the results that the command wrote; it must succeed. See `run`."""
    done = run(program, "--out", str(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.long
def test_every_part_runs_on_another_device_than_the_cpu_and_agrees_with_huggingface(
    tmp_path: Path,
) -> None:
    written = results(
        tmp_path / "out.json",
        "import tinkercloud_testing.training.elsewhere",
        "--device",
        "elsewhere",
    )

    verdicts = {m["id"]: m["verdict"] for m in written["measurements"]}
    assert written["device"]["name"] == "elsewhere"
    assert written["failed"] == {}
    assert verdicts.keys() == EVERY_FIGURE - MEMORY - MEGATRON - IMAGES
    assert {verdicts[f"N{number}"] for number in range(1, 8)} == {"pass"}
    assert {verdict for name, verdict in verdicts.items() if name[0] == "G"} == {"not compared"}
    assert {"has no memory statistics" in written["skipped"][name] for name in MEMORY} == {True}
    assert {"not on elsewhere" in written["skipped"][name] for name in MEGATRON | IMAGES} == {True}
    assert "sglang is not installed" in written["skipped"]["S1"]
    assert written["skipped"].keys() == ABSENT | MEMORY | MEGATRON | IMAGES | SERVED


@pytest.mark.long
def test_the_megatron_trainer_agrees_with_huggingface_and_the_torch_trainer(
    tmp_path: Path,
) -> None:
    figures = ["M1", "M3", "M6", "G2m"]

    written = results(tmp_path / "out.json", "", "--device", "cpu", "--only", *figures)

    verdicts = {m["id"]: m["verdict"] for m in written["measurements"]}
    assert written["failed"] == {}
    assert verdicts["G2m"] == "not compared"
    assert {verdicts[f"M{number}"] for number in (1, 2, 3, 4, 6, 7)} == {"strong"}
    assert verdicts["M5"] == "pass"


@pytest.mark.long
def test_a_nan_gradient_fails_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    done = run(SPOILING, "--out", str(out), "--device", "cpu", "--only", "M3")

    measured = {m["id"]: m for m in json.loads(out.read_text())["measurements"]}
    assert done.returncode == 1, done.stdout + done.stderr
    assert measured["M3"]["verdict"] == "strong"
    assert (measured["M4"]["value"], measured["M4"]["verdict"]) == (math.inf, "below")


@pytest.mark.long
def test_with_only_torch_and_transformers_all_figures_that_need_no_more_are_measured(
    tmp_path: Path,
) -> None:
    written = results(
        tmp_path / "out.json", "import tinkercloud_testing.serving.bare_machine", "--device", "cpu"
    )

    verdicts = {m["id"]: m["verdict"] for m in written["measurements"]}
    skipped = written["skipped"]
    assert written["failed"] == {}
    assert written["git"].keys() == {"commit", "dirty"}
    assert verdicts.keys() == EVERY_FIGURE - NEED_PEFT - MEMORY - MEGATRON
    assert {verdicts[f"N{number}"] for number in range(1, 8)} == {"pass"}
    assert skipped.keys() == ABSENT | NEED_PEFT | MEMORY | MEGATRON | SERVED
    assert {skipped[name] for name in NEED_PEFT} == {"peft is not installed (pip install peft)"}
    assert {skipped[name] for name in MEGATRON} == {
        "megatron-core is not installed (pip install megatron-core)"
    }
    assert {skipped[name] for name in MEMORY if name[0] == "P"} == {
        "pydantic is not installed (pip install pydantic)"
    }
    assert {"is not installed (pip install" in skipped[name] for name in SERVED} == {True}
    versions = written["versions"]
    assert versions["torch"]
    assert versions["transformers"]
    assert versions["tinker"] is versions["peft"] is None


@pytest.mark.long
def test_a_run_that_measures_nothing_fails_with_a_message(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    done = run("", "--out", str(out), "--device", "cpu", "--only", "G6")

    assert done.returncode == 1
    assert "Nothing was measured; the reasons are listed above" in done.stderr
    assert "has no memory statistics" in json.loads(out.read_text())["skipped"]["G6"]


@pytest.mark.long
def test_an_unknown_figure_is_rejected_with_the_valid_ones(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    refused = run("", "--out", str(out), "--device", "cpu", "--only", "N1", "S166")

    assert refused.returncode == 2
    assert "unknown figure 'S166'; valid figures: N1, N2" in refused.stderr
    assert "S16, S17" in refused.stderr
    assert not out.exists()


@pytest.mark.long
def test_a_figure_with_variants_is_selected_by_its_number(tmp_path: Path) -> None:
    written = results(tmp_path / "out.json", "", "--device", "cpu", "--only", "G11", "G1")

    measured = {m["id"] for m in written["measurements"]}
    assert measured == {"G11a", "G11b", "G12", "G14", "G1"}


@pytest.mark.long
def test_each_run_of_a_day_has_its_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    elsewhere = (
        "import pathlib\n"
        "from benchmarks.gpu import __main__ as command\n"
        f"command.ROOT = pathlib.Path({str(tmp_path)!r})"
    )

    for figure in ("N1", "G7"):
        assert run(elsewhere, "--device", "cpu", "--only", figure).returncode == 0

    measured = [
        [m["id"] for m in json.loads(file.read_text())["measurements"]]
        for file in sorted(folder.iterdir(), key=lambda file: (len(file.name), file.name))
    ]
    assert measured == [["N1"], ["G7"]]
