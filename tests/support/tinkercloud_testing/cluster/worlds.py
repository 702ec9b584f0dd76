"""A namespace with sessions, and an operator that can be killed and disconnected."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    make_operator,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.faulty_api import FaultyApi, a_faulty_api

PATIENCE = {"last_checkpoint_seconds": 1, "drain_seconds": 1, "suspend_seconds": 1}
"""Short times to save: the heads of simulated pods are stand-ins, which have nothing to save."""


@dataclass(frozen=True)
class World:
    """A namespace with an operator whose connection to the API server can be made to fail."""

    sessions: Sessions
    api: FaultyApi
    operator: RunningOperator


@contextlib.contextmanager
def a_world(cluster: Cluster, folder: Path, name: str, **settings: object) -> Iterator[World]:
    """Create a namespace, and an operator for it that is not started yet."""
    with cluster.a_namespace(name) as namespace:
        cluster.apply(a_base_model(namespace), *a_volume(namespace))
        with a_faulty_api(operator_account(cluster, namespace, folder)) as api:
            operator = make_operator(api.kubeconfig, namespace, folder, **PATIENCE, **settings)
            try:
                yield World(Sessions(cluster, namespace), api, operator)
                operator.program.start()
                cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=180s")
            finally:
                operator.program.kill()
                sys.stdout.write(operator.program.log_tail())
