"""Write the version of `pyproject.toml` into all files that name it; with --check, only compare.

`python tools/version.py 0.2.0` changes the version first. Packages name it themselves, and not by a
file outside them, because a source distribution and the layers of an image have no such file.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "pyproject.toml"
RELEASE = r"\d+\.\d+\.\d+"
"""PEP 440 and SemVer, which Helm requires, spell only these versions alike."""
DECLARED = rf'^version = "({RELEASE})"'
IMAGE = rf"\btinkercloud-[a-z-]+:({RELEASE})"
PLACES = {
    SOURCE: [DECLARED],
    "*/pyproject.toml": [DECLARED, rf'"tinkercloud-[a-z]+(?:\[[a-z,]+\])?==({RELEASE})"'],
    "uv.lock": [rf'^name = "tinkercloud(?:-[a-z]+)?"\nversion = "({RELEASE})"'],
    "Dockerfile": [IMAGE],
    "charts/*/Chart.yaml": [
        rf"^(?:version|appVersion): ({RELEASE})",
        rf"^  - name: kuberay\n    version: ({RELEASE})",
    ],
    "charts/tinkercloud/charts/*/Chart.yaml": [rf"^version: ({RELEASE})"],
    "charts/tinkercloud/ci/*.yaml": [IMAGE],
    "charts/tinkercloud/examples/*.yaml": [IMAGE],
    "crds/examples/*.yaml": [IMAGE],
    "deploy/argocd/*.yaml": [rf"^ +targetRevision: v({RELEASE})"],
    "deploy/flux/*.yaml": [rf"^ +tag: v({RELEASE})"],
    "deploy/kustomize/overlays/example/*.yaml": [IMAGE, rf"^ +newTag: ({RELEASE})"],
    "deploy/kustomize/base/tinkercloud.yaml": [
        IMAGE,
        rf"^ +app\.kubernetes\.io/version: ({RELEASE})",
        rf"^ +helm\.sh/chart: tinkercloud-({RELEASE})",
    ],
    "docs/operate/*.md": [IMAGE, rf"\$\{{image%%:\*\}}:({RELEASE})"],
    "docs/operate/gitops.md": [
        rf"^ +targetRevision: ({RELEASE})",
        rf"^ +ref: \{{ tag: ({RELEASE}) \}}",
    ],
    "docs/operate/quickstart.md": [
        rf"charts/tinkercloud[a-z-]* --version ({RELEASE})",
        rf"\b(?:Tenant|the chart) of ({RELEASE})",
    ],
    "docs/use/http-api.md": [rf'"version": "({RELEASE})"'],
}
"""Where the version is named: for each pattern of files, expressions whose group is the version."""


def main() -> None:
    """Write the files, or list those that name another version."""
    arguments = sys.argv[1:]
    is_check = arguments == ["--check"]
    version = declared() if is_check or not arguments else requested(arguments)
    stale = [path for path, before, after in files(version) if before != after]
    if is_check:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.exit(f"not version {version}: {names}; run `python tools/version.py`")
        return
    for path, _, after in files(version):
        path.write_text(after)
    print(f"version {version}; changed {len(stale)} files")


def declared() -> str:
    """Return the version in `pyproject.toml`."""
    found = re.search(DECLARED, (ROOT / SOURCE).read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f'{SOURCE}: expected a line such as version = "1.2.3" in [project]')
    return found[1]


def requested(arguments: list[str]) -> str:
    """Return the version on the command line, or exit with a message."""
    if len(arguments) != 1 or re.fullmatch(RELEASE, arguments[0]) is None:
        sys.exit(
            f"got {' '.join(arguments)!r}; expected --check or a version of three numbers, such as"
            " 1.2.3: Helm and Python spell other versions differently"
        )
    return arguments[0]


def files(version: str) -> Iterator[tuple[Path, str, str]]:
    """Yield each file that names the version, its text, and its text with this version.

    Args:
        version: the version to name.
    """
    for pattern, expressions in PLACES.items():
        matched = sorted(ROOT.glob(pattern))
        texts = {path: path.read_text() for path in matched}
        for expression in expressions:
            if not any(re.search(expression, text, re.MULTILINE) for text in texts.values()):
                sys.exit(f"tools/version.py: {expression!r} matches nothing in {pattern}")
        for path, before in texts.items():
            after = before
            for expression in expressions:
                after = re.sub(
                    expression, lambda found: with_version(found, version), after, flags=re.M
                )
            yield path, before, after


def with_version(found: re.Match[str], version: str) -> str:
    """Return a match in which the group is the version."""
    start, end = (place - found.start() for place in found.span(1))
    return f"{found[0][:start]}{version}{found[0][end:]}"


main()
