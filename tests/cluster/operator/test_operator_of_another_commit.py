"""The operator of this commit continues a cluster that the operator of an earlier one runs.

By hand: `TINKERCLOUD_TEST_PREVIOUS` names the earlier commit.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    install_definitions,
    make_operator,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.releases import tree_of
from tinkercloud_testing.cluster.worlds import PATIENCE

PREVIOUS = os.environ.get("TINKERCLOUD_TEST_PREVIOUS")
KINDS = "rayclusters,pods,services,secrets,networkpolicies,poddisruptionbudgets"

pytestmark = pytest.mark.skipif(PREVIOUS is None, reason="needs TINKERCLOUD_TEST_PREVIOUS")


def of_tree(operator: RunningOperator, tree: Path) -> RunningOperator:
    """Return an operator that runs the programs of another tree."""
    support = tree / "tests" / "support"
    [module] = support.rglob("operator_with_heads.py")
    name = ".".join(module.relative_to(support).with_suffix("").parts)
    sources = [str(support), *map(str, sorted(tree.glob("*/src")))]
    python, *_ = operator.program.arguments
    program = replace(
        operator.program,
        arguments=(python, "-m", name),
        environment={**operator.program.environment, "PYTHONPATH": os.pathsep.join(sources)},
    )
    return replace(operator, program=program)


def identities(sessions: Sessions, name: str) -> Mapping[str, str]:
    """Return the unique ids of the objects of a session, by kind and name."""
    found = sessions.cluster.objects(KINDS, sessions.namespace, f"tinkercloud.dev/session={name}")
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"] for item in found}


@pytest.mark.timeout(1800)
def test_sessions_of_an_earlier_commit_keep_their_pods_and_suspended_ones_resume(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path, tmp_path: Path
) -> None:
    tree = tree_of(str(PREVIOUS), tmp_path / "earlier")
    for path in sorted((tree / "crds").glob("tinkercloud.dev_*.yaml")):
        cluster.apply_text(path.read_text())
    cluster.wait_until_established("trainingsessions.tinkercloud.dev")
    kwok.add("earlier-0", gpus=16)
    with cluster.a_namespace("earlier") as namespace:
        sessions = Sessions(cluster, namespace)
        account = operator_account(cluster, namespace, cluster_folder)
        current = make_operator(account, namespace, cluster_folder, **PATIENCE)
        earlier = of_tree(current, tree)
        cluster.apply(a_base_model(namespace), *a_volume(namespace))
        earlier.program.start()
        try:
            sessions.make_ready("ready")
            sessions.make_ready("asleep")
            sessions.make("asleep", suspend=True)
            sessions.wait_for("asleep", "condition=Suspended")
        finally:
            earlier.program.stop()
        before = identities(sessions, "ready")

        install_definitions(cluster)
        current.program.start()
        try:
            current.rest()
            after = identities(sessions, "ready")
            phases = {name: sessions.status(name)["phase"] for name in ("ready", "asleep")}
            sessions.make("asleep", suspend=False)
            sessions.wait_for("asleep", "condition=Ready")
            sessions.make_ready("new")
            sessions.delete("ready")
            sessions.wait_until_nothing_is_left("ready")
        finally:
            current.program.stop()

    assert "RayCluster/ready" in before
    assert {name: after.get(name) for name in before} == before
    assert phases == {"ready": "Ready", "asleep": "Suspended"}
