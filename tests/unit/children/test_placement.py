"""The placement of each role's pods, and the labels that other schedulers read."""

from tinkercloud_crds import labels
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.sessions import ENGINES, TRAINERS, Json, a_base_model, a_build


def templates(build: Build) -> list[Json]:
    """Return the pod templates, the head's first."""
    spec = ray_cluster(build)["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"] for group in groups]


ROLES: Json = {
    "head": {"image": "worker:1", "placement": {"nodeSelector": {"pool": "cpu"}}},
    "trainer": TRAINERS | {"placement": {"tolerations": [], "topologyAffinity": {"key": "rack"}}},
    "sampler": ENGINES | {"placement": {"nodeSelector": {"gpu": "L40S"}}},
    "placement": {
        "nodeSelector": {"gpu": "H100"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "schedulerName": "volcano",
        "podLabels": {"team": "a", "runai/queue": "research"},
        "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        "topologyAffinity": {"key": "zone", "enforcement": "Preferred"},
    },
}


def test_each_role_may_have_its_own_placement() -> None:
    [head, trainer, *samplers] = templates(a_build(a_base_model(**ROLES)))
    selectors = [pod["spec"]["nodeSelector"] for pod in (head, trainer, *samplers)]
    tolerated = [len(pod["spec"].get("tolerations", [])) for pod in (head, trainer, *samplers)]

    assert selectors == [{"pool": "cpu"}, {"gpu": "H100"}, {"gpu": "L40S"}, {"gpu": "L40S"}]
    assert tolerated == [1, 0, 1, 1]


def test_pods_run_near_all_of_the_session_or_near_those_of_their_role() -> None:
    [head, trainer, *_] = templates(a_build(a_base_model(**ROLES)))
    [near_all] = head["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    [near_trainers] = trainer["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]

    assert near_all["podAffinityTerm"] == {
        "labelSelector": {"matchLabels": {labels.SESSION_LABEL: "one"}},
        "topologyKey": "zone",
    }
    assert near_trainers == {
        "labelSelector": {
            "matchLabels": {labels.SESSION_LABEL: "one", labels.COMPONENT_LABEL: "trainer"}
        },
        "topologyKey": "rack",
    }


def test_pods_have_the_labels_of_the_placement_without_losing_ours() -> None:
    # Older CRDs accepted reserved names.
    reserved = {labels.SESSION_LABEL: "another", "ray.io/overwrite-container-cmd": "false"}
    placement = ROLES["placement"] | {"podLabels": reserved | ROLES["placement"]["podLabels"]}
    placement["podAnnotations"] = reserved | placement["podAnnotations"]
    build = a_build(a_base_model(**ROLES | {"placement": placement}))

    for pod in templates(build):
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["labels"]["runai/queue"] == "research"
        assert pod["metadata"]["labels"][labels.SESSION_LABEL] == "one"
        assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    [head, *_] = templates(build)
    assert head["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


def test_a_ray_cluster_has_the_labels_of_the_placement_without_losing_ours() -> None:
    placement: Json = {
        "queueName": "research",
        "rayClusterLabels": {"team": "a", labels.QUEUE_LABEL: "another"},
        "rayClusterAnnotations": {"note": "b", labels.STARTED_WITH: "nothing"},
    }
    metadata = ray_cluster(a_build(a_base_model(placement=placement)))["metadata"]

    assert metadata["labels"] == {"team": "a", labels.QUEUE_LABEL: "research"}
    assert metadata["annotations"]["note"] == "b"
    assert metadata["annotations"][labels.STARTED_WITH] != "nothing"
