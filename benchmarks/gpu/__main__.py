"""`python -m benchmarks.gpu`: run all benchmarks possible on this machine, and list the others.

Results are written after every part, so that an interrupted run keeps them.
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
from benchmarks.shared.measuring import Measurement, revision

ROOT = Path(__file__).parents[2]
PACKAGES_OF_OURS = ("protocol", "worker_image", "crds", "operator")
ENGINE = [
    *(str(ROOT / folder / "src") for folder in PACKAGES_OF_OURS),
    str(ROOT / "tests" / "support"),
]
COMPARED_WITH = "H200"
"""The GPU for which target values are defined."""
NUMERICS = ("N", "M", "S")
"""Figures whose bounds apply to every device."""
BUDGET_SECONDS = 540.0
DISTRIBUTIONS = {"megatron": "megatron-core"}
"""Distribution names of modules with a different name."""
PACKAGES = ("torch", "transformers", "peft", "tinker", "megatron-core", "sglang", "vllm")


@dataclass(frozen=True)
class Part:
    """A group of figures and the function that yields them."""

    figures: tuple[str, ...]
    module: str
    function: str


PARTS = (
    Part(("N1",), "lm_head", "gradient"),
    Part(("N2", "N3", "N4"), "numerics", "float32"),
    Part(("N5",), "numerics", "bfloat16"),
    Part(("N6", "N7", "G13"), "numerics", "sampling"),
    Part(("N8",), "images", "logprobs"),
    Part(("G6",), "lm_head", "memory"),
    Part(("G7",), "lm_head", "speed"),
    Part(("M1", "M2", "M5"), "megatron", "dense"),
    Part(("M3", "M4"), "megatron", "mixture"),
    Part(("M6", "M7"), "megatron", "steps"),
    Part(("M8",), "megatron", "bfloat16"),
    Part(("G11a",), "decoding", "small"),
    Part(("G3",), "training", "small"),
    Part(("G4", "G5"), "training", "bare"),
    Part(("G2",), "training", "middle"),
    Part(("G8",), "training", "tenants"),
    Part(("G17",), "training", "small_tenants"),
    Part(("G15",), "leaving", "paging"),
    Part(("G16",), "leaving", "snapshots"),
    Part(("G9",), "training", "adapter_cost"),
    Part(("G2m",), "megatron", "middle"),
    Part(("G1",), "training", "large"),
    Part(("G11b", "G12", "G14"), "decoding", "large"),
    Part(("G10",), "training", "longest_context"),
    Part(("G1m",), "megatron", "large"),
    Part(("P1", "P2", "P3", "P4", "P5"), "memory", "torch_trainer"),
    Part(("P6", "P7", "P8", "P9", "P10"), "memory", "megatron"),
    Part((*(f"S{number}" for number in (*range(1, 10), 13, 14, 29, 30)),), "sglang", "served"),
    Part(("S16", "S17", "S18"), "sglang", "mixture"),
    Part(("S19", "S20"), "sglang", "latent_attention"),
    Part(("S21", "S22", "S23", "S25"), "sglang", "two_ranks"),
    Part(("S26", "S27"), "sglang_checks.sglang_ranks", "from_ranks"),
    Part(("S10", "S11", "S12"), "sglang", "colocated"),
)
"""Numerics first, then small to large models, memory-intensive parts later, and third-party servers
last."""


@dataclass
class Report:
    """The results of a run."""

    bench: Bench
    size: str
    started: float = field(default_factory=time.monotonic)
    measured: list[Measurement] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    git: dict[str, object] = field(default_factory=lambda: revision(ROOT))
    """The revision at the start."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def is_good(self) -> bool:
        """Whether there are results, nothing failed, and all numerics match Hugging Face."""
        numerics = [m for m in self.measured if m.id.startswith(NUMERICS)]
        right = all(m.verdict != "below" for m in numerics)
        return bool(self.measured) and not self.failed and right

    def verdict(self, measurement: Measurement) -> str:
        """Return the verdict on a figure; speed and memory are only judged on the target GPU."""
        compared = measurement.id.startswith(NUMERICS) or (
            self.size == "full" and COMPARED_WITH in self.bench.name
        )
        return measurement.verdict if compared else "not compared"

    def content(self) -> dict[str, object]:
        """Return the report as JSON content."""
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
    """Return a description of the machine."""
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
    """Return installed versions; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def versions_of(python: str) -> dict[str, str]:
    """Return the versions installed for another Python."""
    program = "from importlib.metadata import distributions as all\nimport json\n"
    program += "print(json.dumps({each.name: each.version for each in all()}))"
    listed = subprocess.run([python, "-c", program], capture_output=True, check=True)
    installed = json.loads(listed.stdout)
    return {name: installed[name] for name in PACKAGES if name in installed}


def not_written(gpus: int) -> Iterator[tuple[str, str]]:
    """Yield what this command does not measure, with the reason."""
    found = find_spec("vllm") is not None
    yield "vllm", "is installed, but not measured by this command" if found else "not installed"
    several = f"{gpus} GPUs available, but this command does not measure several ranks"
    yield "several GPUs", several if gpus > 1 else "at most one GPU available"


def run(part: Part, report: Report) -> Iterator[Measurement]:
    """Yield a part's figures.

    Raises:
        Skipped: the time budget is used up.
    """
    if report.seconds > BUDGET_SECONDS:
        raise Skipped(f"time: the budget of {BUDGET_SECONDS:.0f} s is used up")
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    yield from getattr(module, part.function)(report.bench)


def measure(report: Report, part: Part) -> None:
    """Add a part's figures to the report, or the reason why there are none."""
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
    except Exception as error:  # noqa: BLE001 - the other parts still run
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
    """Return the figures of a name: the figure itself, or those that append a letter to it.

    Raises:
        ArgumentTypeError: there are none.
    """
    known = [figure for part in PARTS for figure in part.figures]
    if name in known:
        return {name}
    found = {figure for figure in known if figure[:-1] == name and figure[-1].isalpha()}
    if not found:
        raise argparse.ArgumentTypeError(
            f"unknown figure {name!r}; valid figures: {', '.join(known)}"
        )
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
    """Return the path for the results of this run: a file that does not exist yet."""
    device = bench.name.replace(" ", "-").lower()
    folder = ROOT / "benchmarks" / "results"
    name = f"gpu-{device}-{datetime.now(UTC):%Y-%m-%d}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(file for name in names if not (file := folder / f"{name}.json").exists())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 0 if there are results, nothing failed and all numerics are
    right."""
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
            "Nothing was measured; the reasons are listed above and in the file.", file=sys.stderr
        )
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
