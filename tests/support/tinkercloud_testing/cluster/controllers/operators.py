"""The operator as a local process, for any cluster."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml

from tinkercloud_testing.cluster.image_build.programs import ROOT, Program
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.resources.charts import CHART, helm

_REST_SECONDS = 3.0
"""Longer than the time for which pod events are batched."""


@dataclass(frozen=True)
class RunningOperator:
    """A running operator."""

    program: Program
    namespace: str
    port: int

    def get(self, path: str) -> str:
        """Return the response of its probe server, for any status."""
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            with urlopen(url, timeout=PATIENCE_SECONDS) as response:
                return str(response.read().decode())
        except HTTPError as error:
            return str(error.read().decode())

    def counted(self, name: str) -> dict[str, int]:
        """Return the values of a counter by labels."""
        lines = self.get("/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
        return {labels.removeprefix(name): int(float(count)) for labels, count in pairs}

    def writes(self) -> int:
        """Return the number of its writes, apart from renewals of its Lease."""
        requests = self.counted("tinkercloud_api_requests_total")
        return sum(count for labels, count in requests.items() if 'verb="GET"' not in labels)

    def rest(self) -> int:
        """Wait until it makes no more writes; return their number."""
        before = -1
        while (made := self.writes()) != before:
            before = made
            time.sleep(_REST_SECONDS)
        return made


def install_definitions(cluster: Cluster) -> None:
    """Apply the definitions of our custom resources, and wait until they are served."""
    for path in sorted((ROOT / "crds").glob("tinkercloud.dev_*.yaml")):
        cluster.apply_text(path.read_text())
    for plural in ("basemodels", "trainingsessions", "tenants"):
        cluster.wait_until_established(f"{plural}.tinkercloud.dev")


@contextlib.contextmanager
def an_operator(
    kubeconfig: Path, namespace: str, folder: Path, **settings: object
) -> Iterator[RunningOperator]:
    """Run the operator for one namespace during a block.

    Args:
        kubeconfig: the account of the operator.
        namespace: the namespace to watch.
        folder: the folder of its log.
        settings: settings of the operator by field name.
    """
    operator = make_operator(kubeconfig, namespace, folder, **settings)
    operator.program.start()
    try:
        yield operator
    finally:
        operator.program.stop()


def make_operator(
    kubeconfig: Path, namespace: str, folder: Path, **settings: object
) -> RunningOperator:
    """Return an operator that is not started yet."""
    port = free_port()
    identity = f"operator-{port}"
    wanted = {"namespace": namespace, "identity": identity, "probe_port": port} | settings
    variables = {
        f"TINKERCLOUD_OPERATOR_{name.upper()}": value
        if isinstance(value, str)
        else json.dumps(value)
        for name, value in wanted.items()
    }
    program = Program(
        name=identity,
        arguments=(
            sys.executable,
            "-m",
            "tinkercloud_testing.cluster.controllers.operator_with_heads",
        ),
        log=folder / f"{identity}.log",
        ready=lambda: _answers(port),
        environment={
            **variables,
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": str(ROOT / "tests" / "support"),
        },
    )
    return RunningOperator(program, namespace, port)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/livez", timeout=2):
        return True
    return False


def operator_account(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """Create the service account of the operator in a namespace, with the rights of the chart.

    Returns:
        The kubeconfig of the account.
    """
    rendered = helm("template", "tinkercloud", str(CHART), f"--namespace={namespace}")
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Lease"}
    rights = [item for item in yaml.safe_load_all(rendered) if item and item["kind"] in kinds]
    cluster.apply(*rights)
    [account] = [
        item["metadata"]["name"]
        for item in rights
        if item["kind"] == "ServiceAccount" and item["metadata"]["name"].endswith("operator")
    ]
    return cluster.kubeconfig_of(account, namespace, folder)
