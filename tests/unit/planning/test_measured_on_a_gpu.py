"""docs/planning.md says what steps took on a GPU, and what is estimated, which is near enough."""

import json
from pathlib import Path

import pytest

from tinkercloud_crds.planning.families import read
from tinkercloud_crds.planning.memory import Layout, training

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "planning.md"
MODELS = json.loads((HERE / "public_models.json").read_text())
RANK = 32


def measured() -> list[tuple[str, int, list[float], float]]:
    """Return the page's models, tokens, and GiB: as measured, and as estimated."""
    section = PAGE.read_text().split("**On a GPU**", 1)[1].split("\nWhat is planned", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    found, name = [], ""
    for line in lines:
        model, batch, *sizes = (cell.strip() for cell in line.strip("|").split("|"))
        name = model or name
        sequences, length = map(int, batch.split(" x "))
        *known, estimate = [float(size.split()[0]) for size in sizes if size != "-"]
        found.append((name, sequences * length, known, estimate))
    return found


@pytest.mark.parametrize(("name", "tokens", "known", "written"), measured())
def test_estimates_are_those_of_the_page_and_little_less_than_what_was_measured(
    name: str, tokens: int, known: list[float], written: float
) -> None:
    model = read(MODELS[f"Qwen/{name}"]["config"])

    memory = training(model, Layout(), tokens=tokens, lora_rank=RANK)

    estimate = (memory.total - memory.fragments) / (1 << 30)
    assert estimate == pytest.approx(written, abs=0.005)
    assert 0.95 * max(known) <= estimate <= 1.1 * max(known)
