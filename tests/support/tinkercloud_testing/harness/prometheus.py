"""A real Prometheus that asks servers of tests for their metrics."""

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.programs import ROOT, Program
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS


def prometheus_folder() -> Path:
    """Return the folder of `prometheus` and `promtool`; load them if they are missing."""
    found = subprocess.run(
        [ROOT / "tools" / "install_prometheus.sh"], check=True, text=True, stdout=subprocess.PIPE
    )
    return Path(found.stdout.strip())


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def answer(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its HTTP API."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            return json.load(response)["data"]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return bool(self.answer("status/runtimeinfo"))
        except OSError:
            return False

    def values(self, expression: str) -> dict[str, float]:
        """Return the values of an expression by their labels, as `a=1 b=2`."""
        found = self.answer("query", query=expression)["result"]
        return {
            " ".join(f"{key}={value}" for key, value in sorted(each["metric"].items())): float(
                each["value"][1]
            )
            for each in found
        }


@contextlib.contextmanager
def a_prometheus(config: Path) -> Iterator[Prometheus]:
    """Run a Prometheus with a configuration file; its data and log are in the file's folder."""
    port = free_port()
    running = Prometheus(port)
    program = Program(
        name="Prometheus",
        arguments=(
            str(prometheus_folder() / "prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ),
        log=config.parent / "prometheus.log",
        ready=running.is_ready,
    )
    program.start()
    try:
        yield running
    finally:
        program.kill()
