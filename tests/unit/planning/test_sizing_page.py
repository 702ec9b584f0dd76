"""docs/operate/sizing.md has the throughputs of the committed measurements."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
H100 = ("gpu-nvidia-h100-80gb-hbm3-2026-11-26.json",)
H200 = ("gpu-nvidia-h200-2026-11-20.json", "gpu-nvidia-h200-2026-11-20-sampler.json")


def measured(files: tuple[str, ...], name: str) -> int:
    """Return the tokens per second of a measurement; the last file that has it counts."""
    found = [
        each
        for file in files
        for each in json.loads((RESULTS / file).read_text())["measurements"]
        if each["id"] == name
    ][-1]
    if found["unit"] == "tokens/s":
        return int(found["value"])
    return int(found["note"].split(" tokens/s")[0])


@pytest.mark.parametrize(
    ("work", "name"),
    [
        ("Qwen3-0.6B, training", "G3"),
        ("Qwen3-4B, training", "G2"),
        ("Qwen3-8B, training", "G1"),
        ("Qwen3-8B, 128 sequences sampled", "G12"),
    ],
)
def test_the_page_has_the_measured_tokens_per_second(work: str, name: str) -> None:
    page = (ROOT / "docs" / "operate" / "sizing.md").read_text()
    one, other = measured(H100, name), measured(H200, name)

    assert f"| {work} | {one} | {other} | {one * 3600 / 1e6:.0f} |" in page
