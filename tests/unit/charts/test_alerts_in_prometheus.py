"""Each alert fires in Prometheus for what it is about, and none does while training goes well."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_testing.harness.prometheus import prometheus_folder
from tinkercloud_testing.resources.charts import CHART, NAMESPACE, of_kind

WELL = {
    'is_leader{pod="a"}': "1x60",
    'is_leader{pod="b"}': "0x60",
    'reconcile_total{result="failed"}': "0x60",
    'reconcile_total{result="retried"}': "0x60",
    'definitions_outdated{kind="RayCluster"}': "0x60",
    'api_requests_total{verb="PATCH", code="200"}': "0+600x60",
    'api_requests_total{verb="PATCH", code="409"}': "0+60x60",
    'sessions{phase="Ready"}': "9x60",
    'session_oldest_seconds{phase="Loading"}': "600x60",
    'session_oldest_seconds{phase="Queued"}': "36000x60",
    "session_restarts_total": "0x60",
    'saves_failed_total{what="run"}': "0x60",
    'session_ready_seconds_bucket{le="1200"}': "0+1x60",
    'session_ready_seconds_bucket{le="3600"}': "0+1x60",
    'session_ready_seconds_bucket{le="+Inf"}': "0+1x60",
    "long_polls": "0x60",
    'http_requests_total{route="/api/v1/forward_backward", status="200"}': "0+60x60",
    'http_requests_total{route="/api/v1/forward_backward", status="503"}': "0+1x60",
    'http_request_seconds_bucket{route="/api/v1/session_heartbeat", le="1"}': "0+60x60",
    'http_request_seconds_bucket{route="/api/v1/session_heartbeat", le="3"}': "0+60x60",
    'http_request_seconds_bucket{route="/api/v1/session_heartbeat", le="+Inf"}': "0+60x60",
    "catalog_errors_total": "0x60",
    'proxy_errors_total{reason="replaced"}': "0+60x60",
    "housekeeping_errors_total": "0x60",
    "degraded_models": "0x60",
    "autosave_failing_models": "0x60",
    "snapshot_failures_total": "0x60",
    'engine_up{engine="a"}': "1x60",
    'proxy_requests_in_flight{owner="ada"}': "3x60",
    'usage_engine_seconds_total{owner="ada"}': "0+50x60",
    'run_loss{owner="ada", run="r"}': "3-0.01x60",
    'owner_wait_seconds_total{owner="ada"}': "0+60x60",
    'owner_requests_total{owner="ada"}': "0+10x60",
}
"""Series of an hour of training, in the notation of Prometheus' tests of rules."""
GOES_WRONG: Mapping[str, Mapping[str, str | None]] = {
    "TinkercloudNoLeader": {'is_leader{pod="a"}': "0x60"},
    "TinkercloudSeveralLeaders": {'is_leader{pod="b"}': "1x60"},
    "TinkercloudReconcileErrors": {'reconcile_total{result="failed"}': "0+60x60"},
    "TinkercloudReconcileRetries": {'reconcile_total{result="retried"}': "0+1x60"},
    "TinkercloudDefinitionsOutdated": {'definitions_outdated{kind="RayCluster"}': "1x60"},
    "TinkercloudKubernetesRefuses": {'api_requests_total{verb="PATCH", code="403"}': "0+60x60"},
    "TinkercloudSessionsFailed": {'sessions{phase="Failed"}': "1x60"},
    "TinkercloudSessionsStuck": {'session_oldest_seconds{phase="Loading"}': "4000x60"},
    "TinkercloudSessionsQueueLong": {'session_oldest_seconds{phase="Queued"}': "90000x60"},
    "TinkercloudHeadsRestart": {"session_restarts_total": "0+1x60"},
    "TinkercloudSavesFail": {'saves_failed_total{what="run"}': "0+1x60"},
    "TinkercloudSessionsStartSlowly": {'session_ready_seconds_bucket{le="1200"}': "0x60"},
    "TinkercloudApiAway": {"long_polls": None},
    "TinkercloudApiErrors": {
        'http_requests_total{route="/api/v1/forward_backward", status="503"}': "0+5x60"
    },
    "TinkercloudApiSlow": {
        'http_request_seconds_bucket{route="/api/v1/session_heartbeat", le="1"}': "0+50x60"
    },
    "TinkercloudCatalogAway": {"catalog_errors_total": "0+1x60"},
    "TinkercloudHeadsBreakOff": {'proxy_errors_total{reason="broken"}': "0+10x60"},
    "TinkercloudHousekeepingFails": {"housekeeping_errors_total": "0+1x60"},
    "TinkercloudNotDurable": {"degraded_models": "1x60"},
    "TinkercloudAutosavesFail": {"autosave_failing_models": "1x60"},
    "TinkercloudSnapshotsFail": {"snapshot_failures_total": "0+1x60"},
    "TinkercloudEngineDown": {'engine_up{engine="b"}': "0x60"},
    "TinkercloudTrainingStalled": {'usage_engine_seconds_total{owner="ada"}': "0x60"},
    "TinkercloudLossNotFinite": {'run_loss{owner="ada", run="r"}': " ".join(["NaN"] * 61)},
    "TinkercloudOwnerWaits": {'owner_wait_seconds_total{owner="ada"}': "0+900x60"},
}
"""By alert, the series in which an hour differs that it is about."""
LABELS = {
    "TinkercloudDefinitionsOutdated": {"kind": "RayCluster"},
    "TinkercloudKubernetesRefuses": {"verb": "PATCH", "code": "403"},
    "TinkercloudSessionsStuck": {"phase": "Loading"},
    "TinkercloudSavesFail": {"what": "run"},
    "TinkercloudApiAway": {"namespace": NAMESPACE},
    "TinkercloudHeadsBreakOff": {"reason": "broken"},
    "TinkercloudEngineDown": {"engine": "b"},
    "TinkercloudTrainingStalled": {"owner": "ada"},
    "TinkercloudLossNotFinite": {"owner": "ada", "run": "r"},
    "TinkercloudOwnerWaits": {"owner": "ada"},
}
"""The labels of alerts that name what they are about."""


def an_hour(
    rules: Mapping[str, Any], alerts: set[str], changed: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return an hour in which these alerts, and no others, are to be firing at its end."""
    values = {name: value for name, value in {**WELL, **changed}.items() if value is not None}
    return {
        "interval": "1m",
        "input_series": [
            {"series": named(name), "values": value} for name, value in values.items()
        ],
        "alert_rule_test": [
            {
                "alertname": name,
                "eval_time": "60m",
                "exp_alerts": [expected(name, rule)] if name in alerts else [],
            }
            for name, rule in rules.items()
        ],
    }


def named(series: str) -> str:
    """Return a series with its prefix and its namespace."""
    name, _, labels = series.partition("{")
    return f'tinkercloud_{name}{{namespace="{NAMESPACE}", {labels or "}"}'


def expected(name: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return an alert as Prometheus sends it."""
    labels = LABELS.get(name, {})
    texts = {key: filled(text, labels) for key, text in rule["annotations"].items()}
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": texts}


def filled(text: str, labels: Mapping[str, str]) -> str:
    """Return a text of an alert with the labels that it names."""
    for label, value in labels.items():
        text = text.replace(f"{{{{ $labels.{label} }}}}", value)
    return text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_alert_fires_for_what_it_is_about_and_none_while_all_is_well(tmp_path: Path) -> None:
    (found,) = of_kind("PrometheusRule", "--values", str(CHART / "ci" / "production.yaml"))
    rules = {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}
    assert GOES_WRONG.keys() == rules.keys()
    hours = [(set[str](), {}), *(({name}, changed) for name, changed in GOES_WRONG.items())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(found["spec"]))
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [an_hour(rules, *each) for each in hours],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))

    result = subprocess.run(
        [prometheus_folder() / "promtool", "test", "rules", tmp_path / "tests.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
