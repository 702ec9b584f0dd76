"""docs/benchmarks.md: the committed results of the benchmarks, a section for each machine."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
_HEAD = """# Benchmarks

<!-- Written by `make docs` from benchmarks/results. Do not edit. -->

Every figure on this page was measured by a command of this repository and committed with its
hardware and versions. Most are ratios of two programs that took turns in one run, because seconds
on a shared machine mean little. Ours is divided by a plain Hugging Face and PEFT loop, by Hugging
Face's `generate`, or by the physical limit of the machine.

| Command | What it measures |
| --- | --- |
| `make bench` | this machine's CPU; `PEER_URL` adds a comparison with another Tinker server |
| `make bench-compare A=old.json B=new.json` | what became worse from one result to another |
| `make bench-gpu` | this machine's GPU ([method](contribute/gpu-benchmarks.md)) |
| `make scale` | the operator with 1,000 sessions |

*Strong* and *enough* say which of the two targets a figure meets; *below* says that it meets
neither, and the note or the linked page says why.
"""


def text() -> str:
    """Return the page."""
    newest_cpu = max(RESULTS.glob("cpu-*.json"), key=lambda file: file.name)
    gpus = sorted(RESULTS.glob("gpu-*.json"), reverse=True)
    return _HEAD + "".join(_section(file) for file in [newest_cpu, *gpus])


def _section(file: Path) -> str:
    result: Mapping[str, Any] = json.loads(file.read_text())
    measured: Sequence[Mapping[str, Any]] = result.get("measurements", [])
    if not measured:
        return ""
    device = result.get("device") or {"name": f"CPU ({result['cpu']})", "cores": result["cores"]}
    versions = ", ".join(f"{name} {each}" for name, each in result["versions"].items() if each)
    commit = (result.get("git") or {}).get("commit")
    lines = [
        f"\n## {device['name']}, {result['date'][:10]}\n",
        f"{device['cores']} cores; {versions}{f'; commit `{commit[:8]}`' if commit else ''}"
        f" ([data](../benchmarks/results/{file.name})).\n",
        "| | What | Measured | Target | |",
        "| --- | --- | --- | --- | --- |",
        *(_row(each) for each in measured),
    ]
    return "\n".join(lines) + "\n"


def _row(measured: Mapping[str, Any]) -> str:
    value = f"{measured['value']:.3g} {measured['unit']}".strip()
    targets = ", ".join(filter(None, (measured["wanted"], measured["strong"])))
    verdict = {"pass": "enough"}.get(measured["verdict"], measured["verdict"])
    note = f"; {measured['note']}" if measured["note"] else ""
    cells = (measured["id"], measured["what"], value, targets, verdict + note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
