"""Placement and metadata of pods: cases for each rule."""

from collections.abc import Mapping
from typing import Any

from tinkercloud_testing.resource_rules.rule import Rule, base_model
from tinkercloud_testing.resources.sessions import ENGINES, EXTERNAL, TRAINERS, Json

ELSEWHERE: Json = {"nodeSelector": {"pool": "cpu"}}
SHAPES: Mapping[str, Json] = {
    "head": {"image": "worker:1"},
    "trainer": TRAINERS,
    "sampler": ENGINES,
}
LABELS = (
    "keys under tinkercloud.dev/, ray.io/ and app.kubernetes.io/ are reserved for Tinkercloud"
    " and KubeRay; use another key, or queueName to set the queue"
)
ANNOTATIONS = (
    "keys under tinkercloud.dev/, ray.io/ and app.kubernetes.io/, and the annotations"
    " cluster-autoscaler.kubernetes.io/safe-to-evict and karpenter.sh/do-not-disrupt, are"
    " reserved for Tinkercloud and KubeRay; use another key"
)


def placed(role: str | None, **placement: Any) -> Json:
    """Return a BaseModel with the placement of a role, or of all pods."""
    if role is None:
        return base_model(placement=placement)
    shapes: Json = {**SHAPES, role: SHAPES[role] | {"placement": placement}}
    return base_model(**shapes)


def _of_map(role: str | None, field: str) -> Rule:
    path = "spec.placement" if role is None else f"spec.{role}.placement"
    is_labels = field.endswith("Labels")

    def named(key: str) -> Json:
        return placed(role, **{field: {"team": "a", key: "b"}})

    others = ["kueue.x-k8s.io/queue-name"] if is_labels else ["karpenter.sh/do-not-disrupt"]
    reserved = ["tinkercloud.dev/session", "ray.io/cluster", "app.kubernetes.io/part-of", *others]
    accepted = [
        "scheduling.x-k8s.io/pod-group",
        "kueue.x-k8s.io/podset-required-topology",
        "my.ray.io/of-somebody-else",
    ]
    return Rule(
        f"{path}.{field}",
        LABELS if is_labels else ANNOTATIONS,
        {key: named(key) for key in accepted},
        {key: named(key) for key in reserved},
    )


def _of_shapes(role: str, without_pods: Json) -> Rule:
    def without(**fields: Any) -> Json:
        shapes: Json = {"trainer": TRAINERS, role: {**without_pods, **fields}}
        return base_model(**shapes)

    return Rule(
        f"spec.{role}",
        "placement: only valid if this role has pods; remove it, or set replicas",
        {
            "pods elsewhere": placed(role, **ELSEWHERE),
            "pods near each other": placed(role, topologyAffinity={"key": "rack"}),
            "no pods": without(),
        },
        {
            "elsewhere": without(placement=ELSEWHERE),
            "labels": without(placement={"podLabels": {"a": "b"}}),
            "nothing": without(placement={}),
        },
    )


PLACEMENT_RULES = (
    _of_map(None, "rayClusterLabels"),
    _of_map(None, "rayClusterAnnotations"),
    *[
        _of_map(role, field)
        for role in (None, "head", "trainer", "sampler")
        for field in ("podLabels", "podAnnotations")
    ],
    _of_shapes("trainer", {}),
    _of_shapes("sampler", EXTERNAL),
)
