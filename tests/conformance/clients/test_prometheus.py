"""Prometheus watches a server and its heads with the configuration of a page of the docs."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.prometheus import a_prometheus, prometheus_folder
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.charts import CHART, ROOT
from tinkercloud_testing.serving.servers import a_server

MODEL = "tiny/llama"
PAGE = ROOT / "docs" / "operate" / "operations.md"


@pytest.mark.long
def test_prometheus_sees_a_training_run_with_the_configuration_of_the_page(
    model_folder: Path, tmp_path: Path
) -> None:
    (text,) = re.findall(r"```yaml\n(rule_files: .*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "alerts").mkdir()
    rules = (CHART / "files" / "alerts" / "api.yaml").read_text()
    (tmp_path / "alerts" / "api.yaml").write_text(rules)

    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        training = server.client().create_lora_training_client(base_model=MODEL, rank=4).result()
        step(training)
        often = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}}
        content = yaml.safe_load(text.replace("9400", str(server.metrics_port)))
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump(often | content))
        checked = subprocess.run(
            [prometheus_folder() / "promtool", "check", "config", config],
            capture_output=True,
            text=True,
            check=False,
        )
        with a_prometheus(config) as prometheus:
            losses = 'tinkercloud_run_loss{namespace="local"}'
            wait_until(lambda: prometheus.values(losses) != {}, "the loss of the run")
            targets = prometheus.answer("targets", state="active")["activeTargets"]
            (group, training_group) = prometheus.answer("rules")["groups"]

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {each["labels"]["job"]: each["health"] for each in targets} == {
        "tinkercloud": "up",
        "tinkercloud-heads": "up",
    }
    assert {rule["health"] for rule in group["rules"] + training_group["rules"]} == {"ok"}
