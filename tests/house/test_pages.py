"""The pages of docs/ cover the code that they describe."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.remedies import REMEDIES
from tinkercloud_operator.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPERATIONS = (DOCS / "operate" / "operations.md").read_text()
CONFIGURATION = (DOCS / "operate" / "configuration.md").read_text()
GPU_BENCHMARKS = (DOCS / "contribute" / "gpu-benchmarks.md").read_text()
EVIDENCE = yaml.safe_load((DOCS / "contribute" / "evidence.yaml").read_text())
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())


class SiteLoader(yaml.SafeLoader):
    """Reads the settings of the site, in which one value names a function of Python."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
NAVIGATION = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)["nav"]  # noqa: S506 - safe
VERDICTS = (
    "CPU", "H200", "definitions", "unproven", "refused", "not written", "not compared",
    "not tested", "-",
)  # fmt: skip


def claims() -> list[tuple[str, dict[str, Any]]]:
    """Return each claim about an engine with its name."""
    return [
        (f"{row['claim']} ({engine})", claim)
        for area in EVIDENCE["areas"]
        for row in area["rows"]
        for engine, claim in row.items()
        if engine != "claim"
    ]


def figures() -> set[str]:
    """Return the ids of all committed measurements, without the letter of a variant."""
    results = (ROOT / "benchmarks" / "results").glob("*.json")
    contents = [json.loads(path.read_text()) for path in results]
    ids = {m["id"] for content in contents for m in content.get("measurements", [])}
    return ids | {each.rstrip("ab") for each in ids}


def pages_of_navigation(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation, in order."""
    pages: list[str] = []
    for entry in entries:
        (target,) = entry.values() if isinstance(entry, dict) else (entry,)
        pages += pages_of_navigation(target) if isinstance(target, list) else [target]
    return pages


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_condition_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in OPERATIONS


def test_the_remedies_of_reasons_are_those_of_the_page() -> None:
    section = OPERATIONS.partition("## Reasons, and what to do")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", section, re.M)
    plain = {name: re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text) for name, text in rows}

    assert {name: plain[name].replace("`", "") for name in REMEDIES} == REMEDIES


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_of_the_operator_is_explained(name: str) -> None:
    assert f"| `{ENV_PREFIX}{name.upper()}` |" in CONFIGURATION


def test_the_versions_to_measure_a_gpu_with_are_those_of_the_lockfile() -> None:
    commands = GPU_BENCHMARKS.partition("## Running the command")[2]
    documented = dict(re.findall(r"([\w-]+)==(\S+)", commands))
    locked = {each["name"]: each["version"] for each in LOCK["package"] if "version" in each}

    assert {"einops", "liger-kernel", "mbridge", "megatron-core"} <= documented.keys()
    assert documented == {name: locked[name] for name in documented}


@pytest.mark.parametrize(("name", "claim"), claims(), ids=[name for name, _ in claims()])
def test_every_claim_has_a_known_verdict_and_evidence_that_exists(
    name: str, claim: dict[str, Any]
) -> None:
    assert claim["says"].startswith(VERDICTS), name
    assert [path for path in claim.get("by", []) if not (ROOT / path).exists()] == []
    cited = {a + b for a, b in re.findall(r"\b([GMNPS])(\d+m?)\b", claim["says"])}
    assert cited <= figures()


@pytest.mark.parametrize("row", EVIDENCE["comparison"], ids=lambda row: row["feature"])
def test_every_cell_of_the_comparison_has_evidence_and_a_missing_feature_has_none(
    row: dict[str, Any],
) -> None:
    is_missing = row["here"].startswith(("no", "rejected"))

    assert is_missing == bool(row.get("unless"))
    assert is_missing != bool(row.get("by"))
    assert [path for path in row.get("by", []) if not (ROOT / path).exists()] == []
    assert contradictions(row.get("unless", {})) == [], "the feature exists: say so"


def contradictions(unless: dict[str, str]) -> list[str]:
    """Return the files of each pattern of paths whose text has the pattern that goes with it."""
    return [
        str(path.relative_to(ROOT))
        for glob, text in unless.items()
        for path in ROOT.glob(glob)
        if path.is_file() and re.search(text, path.read_text())
    ]


def test_the_readme_links_every_page_of_the_docs() -> None:
    table = (ROOT / "README.md").read_text().partition("## Documentation\n")[2]
    linked = set(re.findall(r"\]\(docs/([^)#]+)", table.partition("## Development")[0]))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert pages - linked - {"index.md"} == set()


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    listed = pages_of_navigation(NAVIGATION)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert len(listed) == len(set(listed))
    assert set(listed) == pages


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    folders = ("*/src", "tests", "benchmarks", "tools")
    paths = [str(path) for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    modules = [path.replace("tinkercloud_", "") for path in paths]

    assert [name for name in named if not any(m.endswith(f"/{name}") for m in modules)] == []


def newest(figure: str) -> dict[str, Any]:
    """Return the newest committed measurement of a figure."""
    results = [
        json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")
    ]
    dated: list[tuple[str, dict[str, Any]]] = [
        (content["date"], measurement)
        for content in results
        for measurement in content.get("measurements", [])
        if measurement["id"] == figure
    ]
    return max(dated, key=lambda each: each[0])[1]


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        ("G8", "{:.2f} times the time"),
        ("G17", "{:.2f} times the time"),
        ("G11b", "| {:.0f}; "),
        ("G12", "; {:,.0f} tokens/s |"),
        ("G14", "| {:.1f} ms |"),
        ("G15", "| {:.0f} ms |"),
        ("G16", "| {:.1f} ms |"),
        ("C11", "{:.1f} times as fast"),
        ("C15", "| {:.5f} |"),
    ],
)
def test_the_readme_has_the_newest_figures(figure: str, text: str) -> None:
    benchmarks = (ROOT / "README.md").read_text().partition("## Benchmarks\n")[2]

    assert text.format(newest(figure)["value"]) in benchmarks.partition("## Recipes")[0]


@pytest.mark.parametrize("figure", ["G1", "G2"])
def test_the_readme_has_the_newest_tokens_per_second(figure: str) -> None:
    tokens = int(newest(figure)["note"].split()[0])

    assert f"{tokens:,} tokens/s" in (ROOT / "README.md").read_text()


def test_the_glossary_lists_each_term_once_in_order() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\*", (DOCS / "glossary.md").read_text(), re.MULTILINE)

    assert [term.lower() for term in terms] == sorted({term.lower() for term in terms})
