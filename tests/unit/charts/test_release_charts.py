"""The charts of a release name their images by digest."""

import runpy
from pathlib import Path

import pytest
import yaml

from tinkercloud_testing.resources.charts import CASES, CHART, ROOT, pod_specs

PUBLISH = runpy.run_path(str(ROOT / "tools" / "release" / "publish.py"))
DIGESTS = {"api-server": f"sha256:{1:064x}", "operator": f"sha256:{2:064x}"}
REGISTRY = "registry.example.com/ml"


@pytest.fixture(scope="module")
def pinned() -> str:
    text: str = PUBLISH["pinned"]((CHART / "values.yaml").read_text(), REGISTRY, DIGESTS)
    return text


def test_every_pod_of_a_released_chart_names_its_image_by_digest(
    pinned: str, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(pinned)
    [one_node] = [case for case in CASES if case.name == "one-node.yaml"]
    options = (f"--values={values}", f"--values={one_node}")

    images = {each["image"] for _, pod in pod_specs(*options) for each in pod["containers"]}

    assert images == {
        f"{REGISTRY}/tinkercloud-api@{DIGESTS['api-server']}",
        f"{REGISTRY}/tinkercloud-operator@{DIGESTS['operator']}",
    }


def test_the_comments_of_the_values_stay(pinned: str) -> None:
    assert pinned.count("#") == (CHART / "values.yaml").read_text().count("#")
    assert yaml.safe_load(pinned)["image"]["registry"] == REGISTRY


def test_a_chart_whose_values_have_no_such_image_is_not_published() -> None:
    with pytest.raises(ValueError, match="have no line like"):
        PUBLISH["pinned"]("image:\n  registry: ''\n", REGISTRY, DIGESTS)
