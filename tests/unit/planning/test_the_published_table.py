"""The table of plans for 33 public models in docs/operate/planning.md is true."""

import json
from pathlib import Path

import pytest

from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import parse
from tinkercloud_planning.search import Demand, Division, divide

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "operate" / "planning.md"
MODELS = json.loads((HERE / "public_models.json").read_text())
AXES = ("tensor", "pipeline", "context", "expert", "data")


def table() -> tuple[list[str], dict[str, list[str]]]:
    """Return the page's fleets, and for each model its cells."""
    section = PAGE.read_text().split("## Public models", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[0][2:], {row[0].strip("`"): row[1:] for row in rows[2:]}


def written(division: Division | None, trainer: str) -> str:
    """Return a plan as the page writes it."""
    if division is None:
        return "-"
    layout, sampler = division.trainer.layout, division.sampler
    assert sampler
    axes = [f"{axis[0]}{size}" for axis in AXES if (size := getattr(layout, axis)) > 1]
    shared = "&" if division.colocated else "+"
    return f"{trainer}{' '.join(axes) or '1'} {shared} {sampler.engines}x{sampler.tensor}"


FLEETS, ROWS = table()


def test_the_table_has_every_public_model_and_several_fleets() -> None:
    assert ROWS.keys() == MODELS.keys()
    assert len(ROWS) >= 20
    assert len(FLEETS) >= 5


@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_what_the_planner_says(name: str) -> None:
    model = read(MODELS[name]["config"])
    demand = Demand(model, min(8192, model.max_context_length), lora_rank=32)

    trainer = "torch " if model.only_torch else ""
    planned = [written(divide(demand, parse(fleet)), trainer) for fleet in FLEETS]

    assert ROWS[name] == [MODELS[name]["parameters"], *planned]
