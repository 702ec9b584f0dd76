"""Metrics of usage have series for a bounded number of owners."""

import pytest

from tinkercloud_api.config import api_metrics
from tinkercloud_testing.serving.metrics import metric_value


def test_owners_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_metrics, "_owners", set())
    others = api_metrics.USAGE_TOKENS.labels(api_metrics.OTHER_OWNERS, "sampled")
    before = metric_value(others)

    for _ in range(2):
        for number in range(api_metrics.MAX_OWNERS + 3):
            amounts = {"sampled_tokens": 5, "engine_seconds": 0.5}
            api_metrics.count_usage(f"bounded-{number}", amounts)

    owners = {
        sample.labels["owner"]
        for family in api_metrics.USAGE_TOKENS.collect()
        for sample in family.samples
    }
    ours = {owner for owner in owners if owner.startswith("bounded-")}
    assert len(ours) == api_metrics.MAX_OWNERS
    assert metric_value(api_metrics.USAGE_TOKENS.labels("bounded-0", "sampled")) == 10
    assert metric_value(others) - before == 2 * 3 * 5
