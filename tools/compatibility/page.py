"""Write docs/compatibility.md from docs/compatibility.json and releases.yaml."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = RESULTS.with_suffix(".md")
RELEASES = HERE / "releases.yaml"

WORKS = "works"
_NEED = ("name", "accepted", "tested", "unproven")
_TITLES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AsyncTinker")
_EXPLANATIONS = {
    r"incorrect event loop": "fails in the SDK, before it sends a request; use the other form",
    r"whoami: .*JWT": "needs sign-in with JWT, and this server has API keys only; `tinker auth"
    " status` works",
    r"(archive|save_weights_external) is not supported": "not served: weights cannot be downloaded"
    " through the API",
    r"copy_weights is not supported": "not served: weights are not copied between projects",
    r"trace_export is not supported": "not served: the server records no traces",
    r"audit is not supported": "not served: the server keeps no audit log",
    r"billing/.* is not supported": "not served: the server bills nothing",
}
"""Reasons by pattern of `method: error`."""
_HEAD = """# Compatibility

<!-- Written by `make compatibility`. Do not edit. -->

## Releases

What each release needs. `tinkercloud cluster check` compares a cluster with it.

"""
_SDK_HEAD = """
## SDK versions

One program exercises every public method of each SDK version against a running server, in both the
blocking and the `_async` form, and checks the results. `make compatibility` repeats this; CI
repeats it for the oldest version, one with JSON and protobuf, and the newest.

| Cell | Meaning |
| --- | --- |
| yes | works |
| blank | this version has no such method |
| number | does not work, or not in both forms; the reason is listed below the tables |

All versions use one server with its default settings, in which every import of the SDK fails: the
installed SDK cannot change the server. How each version sends batches of training data:

| SDK | Batches | Results |
| --- | --- | --- |
| up to 0.21 | JSON to `forward_backward` and `forward` | JSON |
| 0.22 to 0.24 | protobuf, because the server asks for it in `client/config` | protobuf |
| from 0.25 | protobuf | protobuf |
"""


def fingerprint() -> str:
    """Return a digest of the program and of the list of versions."""
    digest = hashlib.sha256()
    for name in ("calls.py", "flows.py", "program.py", "world.py", "versions.txt"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def is_current() -> bool:
    """Whether the committed results are of this program and this list of versions."""
    return bool(json.loads(RESULTS.read_text())["program"] == fingerprint())


def explanation(method: str, result: str) -> str | None:
    """Return why a method does not work, WORKS if it works, or None if nobody has explained it."""
    if result == WORKS:
        return WORKS
    for pattern, reason in _EXPLANATIONS.items():
        if re.search(pattern, f"{method}: {result}"):
            return reason
    return None


def text() -> str:
    """Return the page."""
    found = json.loads(RESULTS.read_text())["versions"]
    rows: dict[str, dict[str, list[str]]] = {}
    for version, results in found.items():
        for method, result in results.items():
            base = method.removesuffix("_async")
            cell = rows.setdefault(base, {}).setdefault(version, [])
            reason = explanation(method, result) or result
            form = f"`{method.rpartition('.')[2]}` " if base != method else ""
            cell.append(WORKS if reason == WORKS else form + reason)
    reasons: list[str] = []
    tables = [
        _table(title, {row: rows[row] for row in names}, list(found), reasons)
        for title, names in _sections(sorted(rows)).items()
    ]
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    methods = "".join(tables) + "\n### Reasons\n\n" + notes
    return _HEAD + releases() + _SDK_HEAD + methods


def releases() -> str:
    """Return the table of what each release needs."""
    lines = [
        "| Release | | Accepted | Run by its tests | Unproven |",
        "| --- | --- | --- | --- | --- |",
    ]
    for release in yaml.safe_load(RELEASES.read_text()):
        for need in release["needs"]:
            cells = (release["release"], *(need[key] for key in _NEED))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sections(names: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the rows of each table by its title: a class, or what takes several methods."""
    sections: dict[str, list[str]] = {title: [] for title in _TITLES}
    for name in names:
        is_method = re.fullmatch(r"\w+(\.\w+)+(\(\w+=\))?", name)
        title = name.partition(".")[0] if is_method else "Programs"
        sections.setdefault(title, []).append(name)
    return sections


def _table(
    title: str,
    rows: Mapping[str, Mapping[str, Sequence[str]]],
    versions: Sequence[str],
    reasons: list[str],
) -> str:
    """Return a section; reasons that it is the first to mention are added to `reasons`."""
    lines = [
        f"\n### {title}\n",
        "| | " + " | ".join(versions) + " |",
        "| --- " * (len(versions) + 1) + "|",
    ]
    for name, cells in rows.items():
        shown = f"`{name.partition('.')[2]}`" if name.startswith(f"{title}.") else name
        marks = [_mark(cells.get(version, ()), reasons) for version in versions]
        lines.append(f"| {shown} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def _mark(outcomes: Sequence[str], reasons: list[str]) -> str:
    failed = dict.fromkeys(outcome for outcome in outcomes if outcome != WORKS)
    if not failed:
        return "yes" if outcomes else ""
    # If both forms fail for the same reason, it is stated once, without a form.
    plain = {reason.partition("` ")[2] if reason.startswith("`") else reason for reason in failed}
    shown = plain if len(plain) == 1 and WORKS not in outcomes else failed
    for reason in shown:
        if reason not in reasons:
            reasons.append(reason)
    return ", ".join(str(reasons.index(reason) + 1) for reason in shown)
