"""Builders of valid custom resources, and of the operator's snapshots of them."""

from collections.abc import Iterable
from dataclasses import fields as fields_of
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import Condition
from tinkercloud_crds.names import Names
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import (
    Answers,
    Children,
    Node,
    Observed,
    OwnerLimits,
    Platform,
    Pod,
    PoolPlace,
    SessionObject,
    SessionPods,
)
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve

Json = dict[str, Any]

NOON = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
"""Creation time of built sessions, and the current time."""
MODEL_NAME = "Qwen/Qwen3-8B"
GPU_TAINT: Json = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
"""Keeps pods without GPUs off GPU nodes."""
TRAINERS: Json = {"backend": "megatron", "replicas": 2, "gpusPerReplica": 4}
"""A trainer's shape with worker pods."""
SAMPLERS: Json = {"backend": "sglang", "image": "sglang:1", "replicas": 1, "gpusPerReplica": 2}
"""A sampler's shape with an SGLang engine and default options."""
ENGINES: Json = {**SAMPLERS, "replicas": 2, "engines": {"adaptersClaimName": "adapters"}}
"""A sampler's shape with SGLang engines that read adapters from a volume."""
COLOCATED: Json = {
    **ENGINES,
    "replicas": 4,
    "colocated": True,
    "engines": {"adaptersClaimName": "adapters", "deviceClassName": "gpu.nvidia.com"},
}
"""A sampler's shape with SGLang engines on the GPUs of `TRAINERS`, two in each pod."""
EXTERNAL: Json = {
    "backend": "external",
    "external": {
        "kind": "vllm",
        "urls": ["http://vllm.inference:8000", "https://vllm.example.org"],
        "keySecretName": "vllm-key",
        "adaptersClaimName": "adapters",
        "adaptersFolder": "/mnt/adapters",
    },
}
"""A sampler's shape with external servers."""

PLATFORM = Platform(has_kuberay=True, has_device_claims=True)
"""A cluster that serves everything; its nodes are unknown."""
_RENAMED = {
    "children": ("children", "own"),
    "pods": ("pods", "required"),
    "scaled_pods": ("pods", "scaled"),
    "program_pods": ("pods", "of_program"),
    "pool_cluster": ("pool", "cluster"),
    "pool_message": ("pool", "message"),
    "move_failure": ("pool", "move_failure"),
}
"""Facts whose names say more than the fields of a part of `Observed`."""
_PARTS = {
    "session": SessionObject,
    "limits": OwnerLimits,
    "children": Children,
    "pods": SessionPods,
    "pool": PoolPlace,
    "platform": Platform,
    "answers": Answers,
}
_PART_OF = {
    each.name: (part, each.name) for part, kind in _PARTS.items() for each in fields_of(kind)
} | _RENAMED

PROGRAMS: Json = {"images": ["programs:1", "programs:2"], "backoffLimit": 2}
"""What a BaseModel offers to programs."""
PROGRAM: Json = {
    "module": "tinker_cookbook.recipes.sl_basic",
    "args": ["model_name=x"],
    "apiKeySecret": {"name": "research-key"},
}
"""A program of a session."""


def a_base_model(**fields: Any) -> BaseModelSpec:
    """Return the spec of a BaseModel; by default its head trains and samples itself."""
    return BaseModelSpec.model_validate(_base_model_fields() | fields)


def a_session(**fields: Any) -> TrainingSessionSpec:
    """Return the spec of a TrainingSession."""
    return TrainingSessionSpec.model_validate(_session_fields() | fields)


def a_base_model_manifest(name: str = "model", namespace: str = "default", **spec: Any) -> Json:
    """Return a BaseModel as in YAML; fields that are None are omitted."""
    return _manifest("BaseModel", name, namespace, _base_model_fields() | spec)


def a_session_manifest(name: str = "one", namespace: str = "default", **spec: Any) -> Json:
    """Return a TrainingSession as in YAML; fields that are None are omitted."""
    return _manifest("TrainingSession", name, namespace, _session_fields() | spec)


def a_node(gpus: int = 8, cpu: float = 64, others: Json | None = None, **fields: Any) -> Node:
    """Return a GPU node, by default with 64 cores and 512 GiB."""
    values: Json = {"labels": {"pool": "gpu"}, "taints": (), "memory": 512 * 2.0**30}
    devices = {"nvidia.com/gpu": gpus, **(others or {})}
    return Node(cpu=cpu, devices=devices, **values | fields)


def a_pod(component: str = "head", **fields: Any) -> Pod:
    """Return a pod, by default ready."""
    values: Json = {
        "name": f"one-{component}",
        "uid": f"uid-of-{component}",
        "component": component,
        "is_scheduled": True,
        "is_started": True,
        "is_ready": True,
        "is_terminating": False,
        "restarts": 0,
        "problem": None,
    }
    return Pod(**values | fields)


def observed(**facts: Any) -> Observed:
    """Return the snapshot of a new session without children; facts as in `changed`."""
    new = Observed(
        session=SessionObject(
            name="one",
            namespace="default",
            uid="uid-of-one",
            generation=1,
            created=NOON,
            deleted=None,
            has_finalizer=False,
            is_declared=True,
            spec=a_session(),
            status=TrainingSessionStatus.model_validate({}),
            last_activity=None,
        ),
        base_model=a_base_model(),
        limits=OwnerLimits(),
        children=Children(own={}, predecessors={}, has_secret=False),
        pods=SessionPods(required=()),
        pool=PoolPlace(),
        platform=PLATFORM,
        answers=Answers(),
        now=NOON,
    )
    return changed(new, **facts)


def changed(before: Observed, **facts: Any) -> Observed:
    """Return a snapshot with other facts.

    Args:
        before: the snapshot.
        facts: fields of `Observed`, or of one of its parts; those of `_RENAMED` by their names
            here.
    """
    parts: dict[str, Json] = {}
    whole: Json = {}
    for name, value in facts.items():
        part, field = _PART_OF.get(name, ("", name))
        if part:
            parts.setdefault(part, {})[field] = value
        else:
            whole[field] = value
    for part, fields in parts.items():
        whole[part] = replace(getattr(before, part), **fields)
    return replace(before, **whole)


def snapshot(watched: Watched, name: str = "one") -> Observed | None:
    """Return what the operator knows of a session, on a complete platform at noon."""
    place = PoolPlace(cluster=watched.pool_cluster(name))
    return watched.observed(name, pool=place, platform=PLATFORM, answers=Answers(), now=NOON)


def a_status(conditions: Iterable[Condition] = (), **fields: Any) -> TrainingSessionStatus:
    """Return a stored status."""
    return TrainingSessionStatus(conditions=list(conditions), **fields)


def a_build(
    base_model: BaseModelSpec | None = None,
    session: TrainingSessionSpec | None = None,
    name: str = "one",
    **settings: Any,
) -> Build:
    """Return the input for a session's children; its base model must accept it."""
    shape = resolve(session or a_session(), base_model or a_base_model(), 0)
    assert isinstance(shape, ResolvedSpec), shape.message
    return Build(Names(name), shape, Settings(**settings))


def _base_model_fields() -> Json:
    return {
        "modelName": MODEL_NAME,
        "source": {"hub": MODEL_NAME},
        "maxContextLength": 4096,
        "head": {"image": "worker:1"},
    }


def _session_fields() -> Json:
    return {"baseModel": MODEL_NAME, "owner": "ada", "lora": {"rank": 8}}


def _manifest(kind: str, name: str, namespace: str, spec: Json) -> Json:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }
