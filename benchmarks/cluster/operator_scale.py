"""`make scale`: a thousand sessions on simulated nodes, and the overhead of the operator.

Everything but the nodes is real: etcd, API server, controller manager, scheduler, KubeRay and the
operator, all on this machine. Prints a table, writes `benchmarks/results/operator-<sessions>-<date>.json`.
`python -m benchmarks.cluster.operator_scale 200` takes fewer sessions.
"""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from tinkercloud_testing.cluster.controllers.kuberay import a_kuberay_operator
from tinkercloud_testing.cluster.controllers.operators import (
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.scale import Load, Result, measure, prepare
from tinkercloud_testing.cluster.image_build.programs import state_folder
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.kube_api.kwok import a_kwok_controller

SESSIONS = 1000
RATE = 5.0


def main() -> None:
    sessions = int(sys.argv[1]) if len(sys.argv) > 1 else SESSIONS
    load = Load(sessions, RATE, steady_seconds=60, patience_seconds=1800)
    with state_folder() as folder:
        result = run(load, folder)
    print(result.as_table())
    write(result)


def run(load: Load, folder: Path) -> Result:
    with (
        a_control_plane(folder) as plane,
        a_kuberay_operator(plane.cluster, folder),
        a_kwok_controller(plane.cluster, folder) as kwok,
    ):
        install_definitions(plane.cluster)
        with plane.cluster.a_namespace("scale") as namespace:
            prepare(plane.cluster, kwok, namespace, load.sessions)
            kubeconfig = operator_account(plane.cluster, namespace, folder)
            # Simulated pods have no session head that could save a last checkpoint.
            # What is measured is the operator, not how long sessions wait for each other.
            settings = {"last_checkpoint_seconds": 1, "starts_in_order": False}
            with an_operator(kubeconfig, namespace, folder, **settings) as operator:
                return measure(plane.cluster, operator, load)


def write(result: Result) -> None:
    now = datetime.now(UTC)
    content = {
        "date": now.isoformat(timespec="seconds"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("kopf", "kubernetes")},
        "result": result.as_row(),
    }
    file = Path(__file__).parents[1] / "results" / f"operator-{result.sessions}-{now:%Y-%m-%d}.json"
    file.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
