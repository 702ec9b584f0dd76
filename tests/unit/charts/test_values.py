"""The chart's values: one documented source, closed, with defaults that are acceptable."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tinkercloud_api.settings import Settings
from tinkercloud_testing.charts import CHART, ROOT, HelmFailed, template

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}{name}", part
        yield from described(part, f"{path}{name}.")


def given(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{path}{name}"
        part = schema["properties"][name]
        if "properties" in part:
            yield from given(value, part, f"{path}{name}.")


def test_what_is_derived_from_the_documented_source_is_fresh() -> None:
    subprocess.run([sys.executable, "tools/charts.py", "--check"], cwd=ROOT, check=True)


def test_every_value_is_described() -> None:
    silent = [path for path, part in described(SCHEMA) if not part.get("description")]

    assert silent == []


def test_every_object_of_known_fields_is_closed() -> None:
    closed = {path: part.get("additionalProperties") for path, part in described(SCHEMA)}
    known = [path for path, part in described(SCHEMA) if "properties" in part]

    assert SCHEMA["additionalProperties"] is False
    assert [path for path in known if closed[path] is not False] == []


def test_values_and_schema_name_the_same_fields() -> None:
    absent_by_default = {"global", "kuberay.global"}

    assert set(given(VALUES, SCHEMA)) == {path for path, _ in described(SCHEMA)} - absent_by_default


def test_the_setting_that_the_chart_gives_as_an_example_is_one_of_a_server_on_kubernetes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = SCHEMA["properties"]["apiServer"]["properties"]["env"]["description"]
    ((name, value),) = re.findall(r'`(TINKERCLOUD_\w+): "(\w+)"`', text)

    monkeypatch.setenv(name, value)

    Settings(provider="kubernetes", checkpoint_root="s3://bucket/x")


def test_the_defaults_are_acceptable() -> None:
    template()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("replicas=2", "'replicas' not allowed"),
        ("apiServer.replica=2", "'replica' not allowed"),
        ("apiServer.replicas=two", "want integer"),
        ("operator.scheduling.nodeSelectors.a=b", "'nodeSelectors' not allowed"),
        ("nameOverride=my app", "does not match pattern"),
        ("checkpoints.root=/checkpoints", "does not match pattern"),
        ("image.pullPolicy=Sometimes", "value must be one of"),
        ("baseModels[0].name=x,baseModels[0].spec.modelNam=y", "'modelNam' not allowed"),
    ],
)
def test_a_value_nobody_reads_or_of_the_wrong_kind_is_refused(option: str, complaint: str) -> None:
    with pytest.raises(HelmFailed, match=complaint):
        template("--set", option)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("apiServer.replicas=2", "apiServer.replicas is 2 .* set database.existingSecret"),
        ("apiServer.autoscaling.enabled=true", "autoscaling.enabled is true, but SQLite"),
        (
            "database.existingSecret=db,apiServer.autoscaling.minReplicas=9",
            "minReplicas is 9, which exceeds maxReplicas, 8",
        ),
        ("httpRoute.enabled=true", "httpRoute.parentRefs is empty"),
        (
            "apiServer.env.TINKERCLOUD_STATE_DIR=/x",
            "TINKERCLOUD_STATE_DIR is already set by the chart",
        ),
        (
            "operator.env.TINKERCLOUD_OPERATOR_NAMESPACE=x",
            "OPERATOR_NAMESPACE is already set by the chart",
        ),
        (
            "operator.serviceAccount.create=false",
            "operator.serviceAccount.create is false and no name is set",
        ),
        (
            "sessions.serviceAccount.create=false,sessions.serviceAccount.name=mine"
            ",sessions.serviceAccount.annotations.a=b",
            "annotate mine yourself",
        ),
        ("fullnameOverride=9-lives", '"9-lives", which is not a valid Service name: set fullnameO'),
        ("fullnameOverride=My_App", '"My_App", which is not a valid Service name: set fullnameO'),
        ("kuberay.enabled=true", "helm dependency build charts/tinkercloud/charts/kuberay"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_what_to_do(
    options: str, complaint: str
) -> None:
    with pytest.raises(HelmFailed, match=complaint):
        template("--set", options)
