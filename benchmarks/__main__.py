"""`make bench`: run the benchmarks, print one table, write `benchmarks/results/cpu-<date>.json`.

Arguments select some benchmarks, whose results are only printed: `python -m benchmarks training
sampling`.
"""

import importlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shared.measuring import Measurement

SUITES = ("training", "sampling", "service", "together", "loop", "starts", "crowd", "peer")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkercloud"
MODEL = os.environ.get("MODEL_FOLDER", str(CACHE / "SmolLM2-135M-Instruct"))


def main() -> None:
    if not Path(MODEL).is_dir():
        sys.exit(f"{MODEL} does not exist: run `make run` once to create it")
    measurements: list[Measurement] = []
    chosen = sys.argv[1:]
    for suite in chosen or SUITES:
        for measurement in importlib.import_module(f"benchmarks.suites.{suite}").measure(MODEL):
            print(
                f"{measurement.id} {measurement.what}: {measurement.value:.4g} {measurement.unit}"
            )
            measurements.append(measurement)
    show(measurements)
    if not chosen:
        write(measurements)


def show(measurements: list[Measurement]) -> None:
    table = Table("id", "what", "value", "wanted", "strong", "verdict", "note")
    for m in measurements:
        value = f"{m.value:.4g} {m.unit}".strip()
        table.add_row(m.id, m.what, value, m.wanted, m.strong, m.verdict, m.note)
    Console(width=160).print(table)


def cpu() -> str:
    """Return the model of the CPU, its architecture where Linux does not say, and its vectors."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


def write(measurements: list[Measurement]) -> None:
    now = datetime.now(UTC)
    content = {
        "date": now.isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tinker")},
        "measurements": [{**m.as_row(), "verdict": m.verdict} for m in measurements],
    }
    file = Path(__file__).parent / "results" / f"cpu-{now:%Y-%m-%d}.json"
    file.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
