"""Dashboards and alerts: they ask for what our programs export, by labels that they set."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

import tinkercloud_operator.metrics
import tinkercloud_worker.metrics
from tinkercloud_api.config import api_metrics
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.charts import CHART, NAMESPACE, ROOT, of_kind, one
from tinkercloud_testing.resources.sessions import a_base_model, a_build

METRICS = (api_metrics, tinkercloud_operator.metrics, tinkercloud_worker.metrics)
WATCHED = ("--values", str(CHART / "ci" / "production.yaml"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
FROM_PROMETHEUS = {"namespace", "pod", "container"}
OF_THE_CLUSTER = {
    "kube_pod_status_phase": "kube-state-metrics",
    "kube_pod_container_status_restarts_total": "kube-state-metrics",
    "container_cpu_usage_seconds_total": "cAdvisor",
    "container_memory_working_set_bytes": "cAdvisor",
}
"""Series of others, and who exports them."""
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def metrics_of(program: ModuleType) -> list[MetricWrapperBase]:
    """Return the metrics that the module of a program's metrics defines."""
    return [each for each in vars(program).values() if isinstance(each, MetricWrapperBase)]


def exported() -> dict[str, set[str]]:
    """Labels of every series of our programs, by name."""
    return {
        f"{family.name}{suffix}": {*metric._labelnames, "le"}
        for program in METRICS
        for metric in metrics_of(program)
        for family in metric.describe()
        for suffix in SUFFIXES[family.type]
    }


def series(expression: str) -> set[str]:
    """Names of the series that a PromQL expression asks for."""
    bare = re.sub(r"\{.*?\}|\[\w+\]|\b(by|without|on|ignoring)\s*\(.*?\)", " ", expression)
    return set(re.findall(r"\b[a-z_]+\b(?!\s*\()", bare)) - {"and", "or", "unless", "bool"}


def minutes(duration: str) -> int:
    """Return a duration of Prometheus that is given in minutes."""
    assert duration.endswith("m"), duration
    return int(duration.removesuffix("m"))


def expressions() -> Sequence[str]:
    """What dashboards and alerts ask Prometheus."""
    (rule,) = of_kind("PrometheusRule", *WATCHED)
    alerts = [each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    panels = [target["expr"] for b in boards for p in b["panels"] for target in p["targets"]]
    return alerts + panels


def test_every_series_that_is_asked_for_is_exported() -> None:
    asked = {name for each in expressions() for name in series(each)}

    assert asked - set(exported()) == set(OF_THE_CLUSTER)


def test_everything_of_the_api_server_is_shown_or_alerted_on() -> None:
    asked = {name for each in expressions() for name in series(each)}
    names = [family.name for metric in metrics_of(api_metrics) for family in metric.describe()]

    unseen = [name for name in names if not any(each.startswith(name) for each in asked)]

    assert len(names) >= 10
    assert unseen == []


@pytest.mark.parametrize("program", METRICS)
def test_every_series_is_explained_to_those_who_run_it(program: ModuleType) -> None:
    families = [family for metric in metrics_of(program) for family in metric.describe()]
    names = [each.name + ("_total" if each.type == "counter" else "") for each in families]
    page = (ROOT / "docs" / "operate" / "operations.md").read_text()

    assert [name for name in names if f"`{name}`" not in page] == []


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


def test_one_machine_has_the_same_alerts_in_a_file_for_prometheus() -> None:
    (rule,) = of_kind("PrometheusRule", *WATCHED)
    text = (CHART / "files" / "alerts" / "api.yaml").read_text()
    of_release = text.replace('"local"', f'"{NAMESPACE}"').replace("namespace local", NAMESPACE)

    assert rule["spec"]["groups"][1:] == yaml.safe_load(of_release)["groups"]
    assert [
        selector
        for selector in re.findall(r"tinkercloud_\w+(.{18})", text)
        if "local" not in selector
    ] == []


def test_an_api_server_that_is_gone_is_missed_by_a_series_that_each_one_has_from_its_start() -> (
    None
):
    text = (CHART / "files" / "alerts" / "api.yaml").read_text()
    from_the_start = {name for name, labels in exported().items() if labels == {"le"}}

    missed = set(re.findall(r"absent\((\w+)\{", text))

    assert missed != set()
    assert missed <= from_the_start


def test_alerts_of_training_name_whose_run_it_is() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts" / "api.yaml").read_text())["groups"][1]
    named = {
        each["alert"]: set(re.findall(r"\$labels\.(\w+)", each["annotations"]["summary"]))
        for each in rules["rules"]
    }

    assert named["TinkercloudLossNotFinite"] == {"owner", "run"}
    assert named["TinkercloudOwnerWaits"] == named["TinkercloudTrainingStalled"] == {"owner"}
    # A label that the expression sums over would be empty.
    for each in rules["rules"]:
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \((.*?)\)", each["expr"]))))
        assert named[each["alert"]] <= kept, each["alert"]


def test_one_failure_that_a_retry_mends_pages_nobody() -> None:
    (rule,) = of_kind("PrometheusRule", *WATCHED)
    rules = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    windows = {
        name: minutes(match.group(1))
        for name, each in rules.items()
        if (match := re.search(r"increase\(.*\[(\w+)\]\)+ > 0$", each["expr"])) is not None
    }

    # One failure counts for as long as the window.
    brief = [
        name for name, window in windows.items() if minutes(rules[name].get("for", "0m")) < window
    ]
    assert brief == []
    # A failed save is repeated after a minute at most, so the alert of a store that is away stays.
    assert windows["TinkercloudSavesFail"] == 5
    assert minutes(rules["TinkercloudSavesFail"]["for"]) == 15


@every_dashboard
def test_a_dashboard_has_panels_side_by_side_and_explains_them(path: Path) -> None:
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


@pytest.mark.parametrize("component", ["api", "operator"])
def test_prometheus_finds_every_replica(component: str) -> None:
    monitor = one("ServiceMonitor", f"tinker-tinkercloud-{component}", *WATCHED)
    (endpoint,) = monitor["spec"]["endpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    services = [
        each
        for each in of_kind("Service", *WATCHED)
        if wanted.items() <= each["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in each["spec"]["ports"]]
    ]
    selector = services[0]["spec"]["selector"]
    templates = [each["spec"]["template"] for each in of_kind("Deployment", *WATCHED)]
    (pod,) = (each for each in templates if selector.items() <= each["metadata"]["labels"].items())
    (container,) = pod["spec"]["containers"]

    assert [each["spec"]["clusterIP"] for each in services] == ["None"]
    target = services[0]["spec"]["ports"][0]["targetPort"]
    assert target in [port["name"] for port in container["ports"]]


def test_prometheus_finds_the_head_of_every_session_and_is_let_in() -> None:
    monitor = one("PodMonitor", "tinker-tinkercloud-session", *WATCHED)["spec"]
    policy = one("NetworkPolicy", "tinker-tinkercloud-session-metrics", *WATCHED)["spec"]
    head = ray_cluster(a_build(a_base_model()))["spec"]["headGroupSpec"]["template"]
    [container] = head["spec"]["containers"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (rule,) = policy["ingress"]
    (port,) = [each for each in container["ports"] if each["name"] == endpoint["port"]]

    assert monitor["selector"] == policy["podSelector"]
    assert monitor["selector"]["matchLabels"].items() <= head["metadata"]["labels"].items()
    assert [each["port"] for each in rule["ports"]] == [port["containerPort"]]
    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_no_ingress_leads_to_the_metrics() -> None:
    exposed = ("--set", "ingress.enabled=true,httpRoute.enabled=true", *WATCHED)
    metrics = {"tinker-tinkercloud-api-metrics", "tinker-tinkercloud-operator-metrics"}
    outward = [str(each) for kind in ("Ingress", "HTTPRoute") for each in of_kind(kind, *exposed)]
    api = one("Service", "tinker-tinkercloud-api", *exposed)

    assert len(outward) == 2
    assert [name for name in metrics for each in outward if name in each] == []
    assert [port["name"] for port in api["spec"]["ports"]] == ["http"]
