"""`python -m benchmarks.gpu`: measure what can be measured here, and say by name what can not.

Results are written after every part, so that a run that is cut off has not been in vain.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch

from benchmarks.gpu.bench import SGLANG_PYTHON, Bench, Skipped
from benchmarks.gpu.workloads import WORKLOADS
from benchmarks.measuring import Measurement, revision

ROOT = Path(__file__).parents[2]
PACKAGES_OF_OURS = ("protocol", "worker_image", "crds", "operator")
ENGINE = [
    *(str(ROOT / folder / "src") for folder in PACKAGES_OF_OURS),
    str(ROOT / "tests" / "support"),
]
COMPARED_WITH = "H200"
"""The GPU that the wanted figures are for."""
NUMERICS = ("N", "M", "S")
"""Figures that have bounds anywhere."""
BUDGET_SECONDS = 540.0
DISTRIBUTIONS = {"megatron": "megatron-core"}
"""Of modules that are called otherwise."""
PACKAGES = ("torch", "transformers", "peft", "tinker", "megatron-core", "sglang", "vllm")


@dataclass(frozen=True)
class Part:
    """Some figures, and the function that yields them."""

    figures: tuple[str, ...]
    module: str
    function: str


PARTS = (
    Part(("N1",), "unembedding", "gradient"),
    Part(("N2", "N3", "N4"), "numerics", "float32"),
    Part(("N5",), "numerics", "bfloat16"),
    Part(("N6", "N7", "G13"), "numerics", "sampling"),
    Part(("G6",), "unembedding", "memory"),
    Part(("G7",), "unembedding", "speed"),
    Part(("M1", "M2", "M5"), "megatron", "dense"),
    Part(("M3", "M4"), "megatron", "mixture"),
    Part(("M6", "M7"), "megatron", "steps"),
    Part(("M8",), "megatron", "bfloat16"),
    Part(("G11a",), "decoding", "small"),
    Part(("G3",), "training", "small"),
    Part(("G4", "G5"), "training", "bare"),
    Part(("G2",), "training", "middle"),
    Part(("G8",), "training", "tenants"),
    Part(("G9",), "training", "adapter_cost"),
    Part(("G2m",), "megatron", "middle"),
    Part(("G1",), "training", "large"),
    Part(("G11b", "G12", "G14"), "decoding", "large"),
    Part(("G10",), "training", "longest_context"),
    Part(("G1m",), "megatron", "large"),
    Part(("P1", "P2", "P3", "P4", "P5"), "memory", "torch_trainer"),
    Part(("P6", "P7", "P8", "P9", "P10"), "memory", "megatron"),
    Part(
        (*(f"S{number}" for number in (*range(1, 10), *range(13, 16), 29, 30)),), "sglang", "served"
    ),
    Part(("S16", "S17", "S18"), "sglang", "mixture"),
    Part(("S19", "S20"), "sglang", "latent_attention"),
    Part(("S21", "S22", "S23", "S24", "S25"), "sglang", "two_ranks"),
    Part(("S26", "S27", "S28"), "sglang_ranks", "from_ranks"),
    Part(("S10", "S11", "S12"), "sglang", "colocated"),
)
"""Numerics first; then from small models to large ones, what takes most memory last, and
servers of others at the end."""


@dataclass
class Report:
    """What came of a run."""

    bench: Bench
    size: str
    started: float = field(default_factory=time.monotonic)
    measured: list[Measurement] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    git: dict[str, object] = field(default_factory=lambda: revision(ROOT))
    """As it was at the beginning."""

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.started

    @property
    def is_good(self) -> bool:
        """Whether there is something, nothing failed and all is computed as Hugging Face does."""
        numerics = [m for m in self.measured if m.id.startswith(NUMERICS)]
        right = all(m.verdict != "below" for m in numerics)
        return bool(self.measured) and not self.failed and right

    def verdict(self, measurement: Measurement) -> str:
        """Return how a figure compares; speeds and memory only where the bounds are for."""
        compared = measurement.id.startswith(NUMERICS) or (
            self.size == "full" and COMPARED_WITH in self.bench.name
        )
        return measurement.verdict if compared else "not compared"

    def content(self) -> dict[str, object]:
        """Return everything as JSON has it."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "size": self.size,
            "device": hardware(self.bench),
            "versions": versions(),
            "sglang_versions": versions_of(os.environ.get(SGLANG_PYTHON, sys.executable)),
            "git": self.git,
            "seconds": round(self.seconds, 1),
            "measurements": [{**m.as_row(), "verdict": self.verdict(m)} for m in self.measured],
            "skipped": self.skipped,
            "failed": self.failed,
        }


def hardware(bench: Bench) -> dict[str, object]:
    """Return what the machine is."""
    found: dict[str, object] = {
        "name": bench.name,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {
            "memory_gib": round(properties.total_memory / (1 << 30), 1),
            "capability": f"{properties.major}.{properties.minor}",
            "gpus": torch.cuda.device_count(),
        }
    return found


def versions() -> dict[str, str | None]:
    """Return which versions are installed; None: not at all."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def versions_of(python: str) -> dict[str, str]:
    """Return which versions another Python has."""
    program = "from importlib.metadata import distributions as all\nimport json\n"
    program += "print(json.dumps({each.name: each.version for each in all()}))"
    told = subprocess.run([python, "-c", program], capture_output=True, check=True)
    installed = json.loads(told.stdout)
    return {name: installed[name] for name in PACKAGES if name in installed}


def not_written(gpus: int) -> Iterator[tuple[str, str]]:
    """Yield what this command does not measure, and why: for lack of it, or of a measurement."""
    found = find_spec("vllm") is not None
    yield "vllm", "is installed, but not measured by this command" if found else "not installed"
    several = f"{gpus} are here, but ranks are not measured by this command"
    yield "several GPUs", several if gpus > 1 else "there is one at most"


def run(part: Part, report: Report) -> Iterator[Measurement]:
    """Yield a part's figures.

    Raises:
        Skipped: there is no time left for it.
    """
    if report.seconds > BUDGET_SECONDS:
        raise Skipped(f"time: {BUDGET_SECONDS:.0f} s are over")
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    yield from getattr(module, part.function)(report.bench)


def measure(report: Report, part: Part) -> None:
    """Add a part's figures to the report, or why there are none."""
    left = list(part.figures)
    reasons = report.skipped
    try:
        for measurement in run(part, report):
            left.remove(measurement.id)
            report.measured.append(measurement)
            show(report, measurement)
        reason = "nothing was measured"
    except Skipped as skipped:
        reason = str(skipped)
    except ModuleNotFoundError as missing:
        module = str(missing.name).partition(".")[0]
        name = DISTRIBUTIONS.get(module, module)
        reason = f"{name} is not installed (pip install {name})"
    except Exception as error:  # noqa: BLE001 - the other parts are measured none the less
        traceback.print_exc()
        reasons, reason = report.failed, f"{type(error).__name__}: {error}"
    for name in left:
        reasons[name] = reason
        print(f"{name:5} {'failed' if reasons is report.failed else 'skipped'}: {reason}")
    report.bench.tidy()


def show(report: Report, measurement: Measurement) -> None:
    """Print a figure."""
    m = measurement
    value = f"{m.value:.4g} {m.unit}".strip()
    print(f"{m.id:5} {m.what}: {value} ({m.wanted}: {report.verdict(m)}) {m.note}", flush=True)


def figures(name: str) -> set[str]:
    """Return the figures of a name: the one that is called so, or those that add a letter to it.

    Raises:
        ArgumentTypeError: there are none.
    """
    known = [figure for part in PARTS for figure in part.figures]
    if name in known:
        return {name}
    found = {figure for figure in known if figure[:-1] == name and figure[-1].isalpha()}
    if not found:
        raise argparse.ArgumentTypeError(f"no figure {name!r}; there are {', '.join(known)}")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="full" if has_gpu else "tiny")
    parser.add_argument("--out", type=Path, help="file to write; default: under benchmarks/results")
    parser.add_argument(
        "--only", nargs="+", type=figures, default=[], metavar="FIGURE", help="such as N2 G11"
    )
    return parser.parse_args(arguments)


def result_file(bench: Bench) -> Path:
    """Return where the results of this run are kept: a file that is not there yet."""
    device = bench.name.replace(" ", "-").lower()
    folder = ROOT / "benchmarks" / "results"
    name = f"gpu-{device}-{datetime.now(UTC):%Y-%m-%d}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(file for name in names if not (file := folder / f"{name}.json").exists())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 if something was measured, nothing failed and all numbers are right."""
    asked = parse(arguments)
    sys.path.extend(path for path in ENGINE if path not in sys.path)
    bench = Bench(torch.device(asked.device), WORKLOADS[asked.size])
    report = Report(bench, asked.size)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report.skipped.update(not_written(gpus))
    out = asked.out or result_file(bench)
    wanted = set().union(*asked.only)
    for part in PARTS:
        if not wanted or wanted & set(part.figures):
            measure(report, part)
            out.write_text(json.dumps(report.content(), indent=2) + "\n")
    print(f"{report.seconds:.0f} s; written to {out}")
    if not report.measured:
        print(
            "Nothing was measured: each figure's reason is above, and in the file.", file=sys.stderr
        )
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
