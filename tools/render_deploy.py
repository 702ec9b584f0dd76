"""Render `deploy/kustomize/base/tinkercloud.yaml` from the chart; with --check, only compare.

Uses the Helm of the tests, which `tools/cluster/build.py` compiles once.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "kustomize" / "base" / "tinkercloud.yaml"
HEADER = "# Rendered from charts/tinkercloud by `python tools/render_deploy.py`. Do not edit.\n"


def helm() -> Path:
    """Return the path of Helm, and build it first if necessary."""
    builder = ROOT / "tools" / "cluster" / "build.py"
    folder = subprocess.check_output([sys.executable, str(builder), "helm"], text=True)  # noqa: S603 - ours
    return Path(folder.strip()) / "bin" / "helm"


def rendered() -> str:
    """Return the chart's objects for kustomize users."""
    chart, values = ROOT / "charts" / "tinkercloud", ROOT / "deploy" / "kustomize" / "values.yaml"
    options = ["--namespace", "tinkercloud", "--values", str(values), "--skip-tests"]
    return HEADER + subprocess.check_output(  # noqa: S603 - ours
        [str(helm()), "template", "tinkercloud", str(chart), *options], text=True
    )


def main() -> None:
    """Write the file, or exit with an error if it is out of date."""
    text = rendered()
    if "--check" in sys.argv:
        if not TARGET.is_file() or TARGET.read_text() != text:
            sys.exit(f"{TARGET} is out of date; run `make generate`")
        return
    TARGET.write_text(text)


main()
