"""Dashboards and alerts: they ask for what the operator exports, by labels that it sets."""

import json
import re
from collections.abc import Sequence

import pytest
from prometheus_client.metrics import MetricWrapperBase

from tinkercloud_operator import metrics
from tinkercloud_testing.charts import CHART, NAMESPACE, of_kind

WATCHED = ("--values", str(CHART / "ci" / "production.yaml"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
FROM_PROMETHEUS = {"namespace", "pod", "container"}
every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def exported() -> dict[str, set[str]]:
    """Labels of every series of the operator, by name."""
    found = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]
    return {
        f"{family.name}{suffix}": {*metric._labelnames, "le"}
        for metric in found
        for family in metric.describe()
        for suffix in ("", "_total", "_bucket", "_sum", "_count")
    }


def expressions() -> Sequence[str]:
    """What dashboards and alerts ask Prometheus."""
    (rule,) = of_kind("PrometheusRule", *WATCHED)
    alerts = [each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    panels = [target["expr"] for b in boards for p in b["panels"] for target in p["targets"]]
    return alerts + panels


def test_every_series_that_is_asked_for_is_exported() -> None:
    asked = {name for each in expressions() for name in re.findall(r"tinkercloud_\w+", each)}

    assert len(asked) >= 8
    assert asked <= set(exported())


def test_series_are_chosen_by_labels_they_have() -> None:
    known = exported()
    chosen = [
        (name, label)
        for each in expressions()
        for name, selector in re.findall(r"(tinkercloud_\w+)\{(.*?)\}", each)
        for label in re.findall(r"(\w+)\s*(?:=~|!=|=)", selector)
    ]

    unknown = [(n, label) for n, label in chosen if label not in known[n] | FROM_PROMETHEUS]

    assert chosen
    assert unknown == []


def test_alerts_are_about_this_release_alone() -> None:
    (rule,) = of_kind("PrometheusRule", *WATCHED)
    alerts = [each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]]

    assert [expr for expr in alerts if f'namespace="{NAMESPACE}"' not in expr] == []


@every_dashboard
def test_a_dashboard_has_panels_side_by_side_and_explains_them(path) -> None:
    board = json.loads(path.read_text())
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_dashboards_reach_grafana_as_they_are() -> None:
    maps = of_kind("ConfigMap", *WATCHED)
    found = {name: json.loads(text) for each in maps for name, text in each["data"].items()}

    assert found == {f"tinkercloud-{p.name}": json.loads(p.read_text()) for p in DASHBOARDS}
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in maps} == {"1"}


def test_prometheus_finds_every_replica_of_the_operator() -> None:
    (monitor,) = of_kind("ServiceMonitor", *WATCHED)
    wanted = monitor["spec"]["selector"]["matchLabels"]
    services = [
        each
        for each in of_kind("Service", *WATCHED)
        if wanted.items() <= each["metadata"]["labels"].items()
    ]
    selector = services[0]["spec"]["selector"]
    templates = [each["spec"]["template"] for each in of_kind("Deployment", *WATCHED)]
    (pod,) = (each for each in templates if selector.items() <= each["metadata"]["labels"].items())
    (container,) = pod["spec"]["containers"]

    assert [each["spec"]["clusterIP"] for each in services] == ["None"]
    assert monitor["spec"]["endpoints"][0]["port"] == services[0]["spec"]["ports"][0]["name"]
    assert services[0]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
