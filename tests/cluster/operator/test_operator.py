"""The operator on a real control plane with KubeRay; pods run on simulated nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_crds import labels
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    MODEL,
    SOON_SECONDS,
    Sessions,
    a_base_model,
    a_session,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT, KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until

TWO_ENGINES = {
    "backend": "sglang",
    "replicas": 2,
    "gpusPerReplica": 1,
    "image": "sglang",
    "engines": {"adaptersClaimName": "models"},
}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("operator-0", gpus=8)
    return cluster


@pytest.fixture(scope="module")
def namespace(definitions: Cluster) -> Iterator[str]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with definitions.a_namespace("operator", **labels) as name:
        definitions.apply(a_base_model(name), *a_volume(name))
        yield name


@pytest.fixture(scope="module")
def operator(
    definitions: Cluster, namespace: str, cluster_folder: Path
) -> Iterator[RunningOperator]:
    kubeconfig = operator_account(definitions, namespace, cluster_folder)
    with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE) as running:
        yield running


def has_raycluster(sessions: Sessions, name: str) -> bool:
    return f"RayCluster/{name}" in sessions.children(name)


def names_in_dns(sessions: Sessions, service: str) -> set[str]:
    """Return the host names of a Service, from the EndpointSlices that DNS is derived from."""
    selector = f"kubernetes.io/service-name={service}"
    slices = sessions.cluster.objects("endpointslices", sessions.namespace, selector)
    return {
        str(endpoint.get("hostname")) for found in slices for endpoint in found.get("endpoints", [])
    }


def test_a_session_becomes_a_raycluster_and_ready(sessions: Sessions) -> None:
    sessions.make_ready("one")

    status = sessions.status("one")
    assert status["phase"] == "Ready"
    assert (status["workers"]["trainers"], status["workers"]["samplers"]) == ("2/2", "1/1")
    assert status["gpus"] == 3
    assert status["endpoint"] == f"http://one-head.{sessions.namespace}.svc:8000"


def test_last_activity_is_the_time_of_the_write_even_if_the_clock_of_the_writer_is_years_behind(
    sessions: Sessions,
) -> None:
    sessions.make_ready("one")
    stamp = "tinkercloud.dev/last-activity=2020-01-01T00:00:00Z"
    where = ("-n", sessions.namespace)

    sessions.cluster.kubectl(
        "annotate", "tsess", "one", stamp, *where, "--field-manager=tinkercloud-api"
    )

    wait_until(
        lambda: "lastActivityTime" in sessions.status("one"), "the use is seen", SOON_SECONDS
    )
    made = sessions.cluster.get("tsess", "one", sessions.namespace)["metadata"]
    assert sessions.status("one")["lastActivityTime"] >= made["creationTimestamp"]


def test_engines_have_named_pods_outside_ray(sessions: Sessions) -> None:
    sessions.cluster.apply(
        a_base_model(sessions.namespace, "engines", modelName="Engines/Model", sampler=TWO_ENGINES)
    )

    sessions.make_ready("sampled", baseModel="Engines/Model")

    selector = "tinkercloud.dev/session=sampled,tinkercloud.dev/component=sampler"
    pods = sessions.cluster.objects("pods", sessions.namespace, selector)
    names = {(pod["spec"]["hostname"], pod["spec"]["subdomain"]) for pod in pods}
    containers = [[item["name"] for item in pod["spec"]["containers"]] for pod in pods]
    assert names == {("sampler-0", "sampled-samplers"), ("sampler-1", "sampled-samplers")}
    assert containers == [["worker", "engine"]] * 2
    assert sessions.status("sampled")["workers"]["samplers"] == "2/2"
    assert sessions.status("sampled")["gpus"] == 2 + 2
    wait_until(
        lambda: names_in_dns(sessions, "sampled-samplers") == {"sampler-0", "sampler-1"},
        "both engines have names",
        SOON_SECONDS,
    )


def test_kubectl_shows_the_columns_for_platform_engineers(sessions: Sessions) -> None:
    sessions.make_ready("shown")

    table = sessions.cluster.kubectl("get", "tsess", "shown", "-n", sessions.namespace)

    header, row = table.splitlines()
    assert header.split() == [
        "NAME",
        "PHASE",
        "READY",
        "MODEL",
        "TRAINERS",
        "SAMPLERS",
        "GPUS",
        "POOL",
        "AGE",
    ]
    assert row.split()[:7] == ["shown", "Ready", "True", MODEL, "2/2", "1/1", "3"]


def test_a_deleted_session_leaves_nothing_behind(sessions: Sessions) -> None:
    sessions.make_ready("gone")

    sessions.delete("gone")

    sessions.wait_until_nothing_is_left("gone")


def test_a_recreated_session_waits_for_the_resources_of_its_predecessor(
    sessions: Sessions,
) -> None:
    where = ("-n", sessions.namespace)
    service = ("service", "one-head", *where, "--type=merge")
    sessions.make_ready("one")
    held = '{"metadata":{"finalizers":["example.org/held"]}}'
    sessions.cluster.kubectl("patch", *service, "-p", held)
    sessions.cluster.kubectl("delete", "tsess", "one", *where, "--wait=true")

    sessions.make("one")
    wait_until(
        lambda: (
            "an earlier session with the same name"
            in sessions.condition("one", "Ready").get("message", "")
        ),
        "the status says what is waited for",
        SOON_SECONDS,
    )

    assert sessions.condition("one", "Stalled")["status"] == "False"
    sessions.cluster.kubectl("patch", *service, "-p", '{"metadata":{"finalizers":null}}')
    sessions.wait_for("one", "condition=Ready")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("raycluster", "one"),
        ("service", "one-head"),
        ("configmap", "one-config"),
        ("secret", "one-token"),
        ("configmap", "one-token"),
        ("networkpolicy", "one"),
        ("poddisruptionbudget", "one"),
    ],
)
def test_a_deleted_child_is_recreated(sessions: Sessions, kind: str, name: str) -> None:
    sessions.make_ready("one")
    uid = sessions.cluster.get(kind, name, sessions.namespace)["metadata"]["uid"]

    sessions.cluster.kubectl("delete", kind, name, "-n", sessions.namespace, "--wait=true")

    sessions.cluster.wait_for(f"{kind}/{name}", "create", sessions.namespace, SOON_SECONDS)
    assert sessions.cluster.get(kind, name, sessions.namespace)["metadata"]["uid"] != uid
    sessions.wait_for("one", "condition=Ready")


@pytest.mark.parametrize(
    ("child", "patch", "path", "value"),
    [
        (
            "service/one-head",
            '{"spec":{"ports":[{"name":"http","port":8000,"targetPort":1}]}}',
            "{.spec.ports[0].targetPort}",
            "8000",
        ),
        ("configmap/one-config", '{"data":{"head.json":"{}"}}', "{.data}", "one"),
        (
            "networkpolicy/one",
            '{"spec":{"ingress":[{}]}}',
            "{.spec.ingress[1].ports[0].port}",
            "8000",
        ),
        ("poddisruptionbudget/one", '{"spec":{"minAvailable":0}}', "{.spec.minAvailable}", "4"),
        ("raycluster/one", '{"spec":{"rayVersion":"1"}}', "{.spec.rayVersion}", "2."),
        (
            "configmap/one-token",
            '{"metadata":{"ownerReferences":null}}',
            "{.metadata.ownerReferences[*].kind}",
            "Secret",
        ),
        (
            "raycluster/one",
            '{"metadata":{"labels":{"tinkercloud.dev/session":"other"}}}',
            "{.metadata.labels.tinkercloud\\.dev/session}",
            "one",
        ),
    ],
)
def test_an_edited_child_is_corrected(
    sessions: Sessions, child: str, patch: str, path: str, value: str
) -> None:
    sessions.make_ready("one")
    where = ("-n", sessions.namespace)

    sessions.cluster.kubectl("patch", child, *where, "--type=merge", "-p", patch)

    def current() -> str:
        return sessions.cluster.kubectl("get", child, *where, "-o", f"jsonpath={path}")

    wait_until(lambda: value in current(), f"{child} {path} is {value} again", SOON_SECONDS)


def test_a_token_survives_the_deletion_of_its_marker(sessions: Sessions) -> None:
    sessions.make_ready("one")
    before = sessions.cluster.get("secret", "one-token", sessions.namespace)

    sessions.cluster.kubectl("delete", "configmap", "one-token", "-n", sessions.namespace)
    sessions.cluster.wait_for("configmap/one-token", "create", sessions.namespace, SOON_SECONDS)

    assert sessions.cluster.get("secret", "one-token", sessions.namespace) == before


def test_a_lost_pod_is_replaced(sessions: Sessions) -> None:
    sessions.make_ready("one")
    selector = "tinkercloud.dev/session=one,tinkercloud.dev/component=head"
    [head] = sessions.cluster.objects("pods", sessions.namespace, selector)

    sessions.cluster.delete("pod", head["metadata"]["name"], sessions.namespace)

    def is_replaced() -> bool:
        status = sessions.status("one")
        return status["phase"] == "Ready" and head["metadata"]["uid"] not in status["incarnation"]

    wait_until(is_replaced, "another head serves", SOON_SECONDS)
    assert sessions.status("one")["restarts"] == 1


def test_a_removed_finalizer_is_restored(sessions: Sessions) -> None:
    sessions.make_ready("one")
    where = ("trainingsession", "one", "-n", sessions.namespace)

    sessions.cluster.kubectl(
        "patch", *where, "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )

    def finalizers() -> str:
        return sessions.cluster.kubectl("get", *where, "-o", "jsonpath={.metadata.finalizers}")

    wait_until(lambda: "last-checkpoint" in finalizers(), "the finalizer", SOON_SECONDS)


def test_a_session_restored_with_its_finalizer_can_be_deleted(sessions: Sessions) -> None:
    restored = a_session(sessions.namespace, "one")
    restored["metadata"]["finalizers"] = [labels.FINALIZER]
    sessions.cluster.apply(restored)
    sessions.wait_for("one", "condition=Ready")

    sessions.delete("one")

    sessions.wait_until_nothing_is_left("one")


def test_a_suspended_session_releases_its_pods_and_resumes(sessions: Sessions) -> None:
    sessions.make_ready("one")

    sessions.make("one", suspend=True)
    sessions.wait_for("one", "condition=Suspended")

    assert sessions.status("one")["phase"] == "Suspended"
    assert not has_raycluster(sessions, "one")
    sessions.make("one", suspend=False)
    sessions.wait_for("one", "condition=Ready")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"baseModel": "Unknown/Model"}, "BaseModelNotFound"),
        ({"lora": {"rank": 1024}}, "NotAllowed"),
        ({"queueName": "other"}, "NotAllowed"),
    ],
)
def test_an_unsatisfiable_session_is_stalled_with_the_reason(
    sessions: Sessions, spec: dict[str, object], reason: str
) -> None:
    sessions.make("refused", **spec)

    sessions.wait_for("refused", "condition=Stalled")

    assert sessions.reason("refused") == reason
    assert not has_raycluster(sessions, "refused")


def test_a_pod_larger_than_every_node_never_fits(sessions: Sessions, kwok: KwokNodes) -> None:
    huge = {"replicas": 1, "gpusPerReplica": 16, "backend": "megatron"}
    sessions.cluster.apply(
        a_base_model(sessions.namespace, "huge", modelName="Huge/Model", trainer=huge)
    )

    sessions.make("huge", baseModel="Huge/Model")
    sessions.wait_for("huge", "condition=Stalled")

    assert sessions.reason("huge") == "NeverFits"


def test_a_session_waits_for_matching_nodes_to_be_added(
    sessions: Sessions, kwok: KwokNodes
) -> None:
    later = {**PLACEMENT, "nodeSelector": {"pool": "later"}}
    trainer = {"replicas": 1, "gpusPerReplica": 4, "backend": "megatron"}
    sessions.cluster.apply(
        a_base_model(
            sessions.namespace, "later", modelName="Later/Model", trainer=trainer, placement=later
        )
    )

    sessions.make("later", baseModel="Later/Model")
    sessions.wait_for_reason("later", "Unschedulable")

    assert sessions.condition("later", "Stalled")["status"] == "False"
    assert "match the BaseModel's placement" in sessions.condition("later", "Ready")["message"]
    kwok.add("operator-later", gpus=8, labels={"pool": "later"})
    sessions.wait_for("later", "condition=Ready")
    kwok.remove("operator-later")


def test_a_session_waiting_for_gpus_is_progressing_and_not_stalled(
    sessions: Sessions, kwok: KwokNodes
) -> None:
    big = {"replicas": 2, "gpusPerReplica": 4, "backend": "megatron"}
    sessions.cluster.apply(
        a_base_model(sessions.namespace, "big", modelName="Big/Model", trainer=big)
    )
    sessions.make_ready("first")

    sessions.make("second", baseModel="Big/Model")
    sessions.wait_for_reason("second", "Unschedulable")

    assert sessions.condition("second", "Stalled")["status"] == "False"
    kwok.add("operator-1", gpus=8)
    sessions.wait_for("second", "condition=Ready")
    kwok.remove("operator-1")


def test_a_foreign_secret_is_neither_used_nor_adopted(sessions: Sessions) -> None:
    where = ("-n", sessions.namespace)
    sessions.cluster.kubectl("create", "secret", "generic", "one-token", *where)

    sessions.make("one")
    sessions.wait_for_reason("one", "ApplyFailed")

    assert "one-token" in sessions.condition("one", "Ready")["message"]
    sessions.cluster.kubectl("delete", "secret", "one-token", *where)
    sessions.wait_for("one", "condition=Ready")


def test_a_restarted_operator_changes_nothing(
    sessions: Sessions, operator: RunningOperator
) -> None:
    sessions.make_ready("one")
    before = sessions.cluster.get("trainingsession", "one", sessions.namespace)

    operator.program.restart()
    wait_until(lambda: "leading" in operator.get("/readyz"), "it leads again", SOON_SECONDS)
    sessions.make_ready("another")

    after = sessions.cluster.get("trainingsession", "one", sessions.namespace)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_a_settled_session_causes_no_writes(sessions: Sessions, operator: RunningOperator) -> None:
    sessions.make_ready("one")
    written, looked = operator.rest(), looks(operator)

    sessions.cluster.kubectl("label", "pods", "-n", sessions.namespace, "--all", "touched=yes")
    wait_until(lambda: looks(operator) > looked, "it is looked at", SOON_SECONDS)

    assert operator.rest() == written


def looks(operator: RunningOperator) -> int:
    """Return how often the operator has reconciled a session."""
    return sum(operator.counted("tinkercloud_reconcile_total").values())
