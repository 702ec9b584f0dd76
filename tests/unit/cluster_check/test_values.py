"""Values files: what the chart of this release refuses, and what the others configure."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_api.cluster_check.values import release_of
from tinkercloud_testing.resources.charts import CASES, CHART, EXAMPLES, ROOT, HelmFailed, template

SPEC = {
    "modelName": "tiny/llama",
    "source": {"hub": "tiny/llama"},
    "maxContextLength": 128,
    "head": {"image": "worker"},
}


def faults(values: dict[str, Any]) -> list[str]:
    """Return what the chart refuses."""
    return list(release_of([values]).faults)


def test_without_values_a_release_has_the_defaults_of_the_chart() -> None:
    release = release_of([])
    documented = yaml.safe_load((CHART / "values.yaml").read_text())

    assert {key: release.values[key] for key in documented} | {"kuberay": None} == documented | {
        "kuberay": None
    }
    assert (release.faults, release.is_given) == ([], False)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_values_that_helm_accepts_have_no_faults(case: Path) -> None:
    assert faults(yaml.safe_load(case.read_text())) == []


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"apiServer": {"replica": 2}},
            "apiServer.replica: the chart of this release has no such value; did you mean"
            " apiServer.replicas?",
        ),
        ({"replicas": 2}, "did you mean apiServer.replicas or operator.replicas?"),
        (
            {"spans": {"url": "x"}},
            "spans: the chart of this release has no such value; remove it, or use the charts"
            " of the release that the file was written for",
        ),
        ({"apiServer": {"replicas": "two"}}, 'apiServer.replicas: expected integer, got "two"'),
        ({"apiServer": {"replicas": True}}, "apiServer.replicas: expected integer, got true"),
        ({"apiServer": 3}, "apiServer: expected object, got 3"),
        (
            {"image": {"pullPolicy": "Sometimes"}},
            'image.pullPolicy: expected one of Always, IfNotPresent, Never, got "Sometimes"',
        ),
        (
            {"baseModels": [{"name": "x", "spec": SPEC | {"modelNam": "y"}}]},
            "baseModels[0].spec.modelNam: the chart of this release has no such value; did you mean"
            " baseModels[0].spec.modelName?",
        ),
        ({"image": {"pullSecrets": [3]}}, "image.pullSecrets[0]: expected string, got 3"),
    ],
)
def test_each_value_of_another_release_is_named_and_helm_refuses_it_too(
    values: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))

    [found] = faults(values)

    assert fault in found
    with pytest.raises(HelmFailed):
        template("--values", str(file))


def test_an_invalid_base_model_is_described_by_its_field() -> None:
    [found] = faults({"baseModels": [{"name": "x", "spec": SPEC | {"maxContextLength": -1}}]})

    assert found.startswith("baseModels[0].spec: maxContextLength")


@pytest.mark.parametrize("document", [[], "text", 3])
def test_a_file_that_is_no_mapping_is_refused_with_its_type(document: Any) -> None:
    found = list(release_of([document]).faults)

    assert found == ([] if document == [] else [found[0]])
    assert document == [] or "expected object" in found[0]


def test_later_files_override_earlier_ones_and_null_removes_a_default() -> None:
    first = {"operator": {"replicas": 1}, "checkpoints": {"root": "s3://a/b"}}
    second = {"operator": {"readNodes": False}, "podSecurity": {"runAsUser": None}}

    values = release_of([first, None, second]).values

    assert (values["operator"]["replicas"], values["operator"]["readNodes"]) == (1, False)
    assert values["checkpoints"]["root"] == "s3://a/b"
    assert values["podSecurity"] == {"runAsUser": None, "fsGroup": 65532}


def test_a_refused_value_counts_as_its_default() -> None:
    release = release_of([{"operator": {"replicas": "many", "readNodes": False}}])

    assert release.values["operator"]["replicas"] == 2
    assert release.values["operator"]["readNodes"] is False


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_named_by_the_quickstart_page(example: Path) -> None:
    page = (ROOT / "docs" / "operate" / "quickstart.md").read_text()

    assert f"examples/{example.name}" in page
