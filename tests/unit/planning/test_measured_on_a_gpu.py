"""docs/operate/planning.md states the recorded and the estimated memory of steps on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_planning.activations import FUSED, SEPARATE
from tinkercloud_planning.families import read
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import training

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RECORD = "benchmarks/results/gpu-nvidia-h200-memory-2026-11-21.json"
MEASURED: dict[str, Any] = json.loads((ROOT / RECORD).read_text())
MODELS = json.loads((HERE / "public_models.json").read_text())
TRAINERS = {"megatron": SEPARATE, "torch": SEPARATE, "torch_with_liger": FUSED}


def estimate(peak: dict[str, Any], trainer: str) -> float:
    """Return the GiB that are planned for a step, without what is not allocated."""
    memory = training(
        read(MODELS[peak["model"]]["config"]),
        Layout(),
        tokens=peak["sequences"] * peak["length"],
        lora_rank=MEASURED["lora_rank"],
        kernels=TRAINERS[trainer],
    )
    return (memory.total - memory.fragments) / (1 << 30)


def written(size: float | None) -> str:
    return "-" if size is None else f"{size:.2f} GiB"


def cell(peak: dict[str, Any], trainer: str) -> str:
    return "-" if peak[trainer] is None else f"{estimate(peak, trainer):.2f} GiB"


def test_the_page_has_the_recorded_peaks_and_what_is_estimated_for_them() -> None:
    page = (ROOT / "docs" / "operate" / "planning.md").read_text()
    section = page.split("**On a GPU**", 1)[1].split("\nWhat is planned", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    models = [peak["model"].removeprefix("Qwen/") for peak in MEASURED["peaks"]]

    assert f"(../../{RECORD})" in section
    assert rows == [
        [
            "" if name == before else name,
            f"{peak['sequences']} x {peak['length']}",
            written(peak["megatron"]),
            written(peak["torch"]),
            cell(peak, "torch"),
            written(peak["torch_with_liger"]),
            cell(peak, "torch_with_liger"),
        ]
        for before, name, peak in zip(["", *models], models, MEASURED["peaks"], strict=False)
    ]


@pytest.mark.parametrize(
    ("peak", "trainer"),
    [
        pytest.param(
            peak, trainer, id=f"{trainer}, {peak['model']}, {peak['sequences']} x {peak['length']}"
        )
        for trainer in TRAINERS
        for peak in MEASURED["peaks"]
        if peak[trainer] is not None
    ],
)
def test_estimates_are_within_a_twentieth_of_what_was_measured(
    peak: dict[str, Any], trainer: str
) -> None:
    assert estimate(peak, trainer) == pytest.approx(peak[trainer], rel=0.05)
