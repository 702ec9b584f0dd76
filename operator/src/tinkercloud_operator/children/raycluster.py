"""The RayCluster: a head, and groups of trainers and samplers.

The head container runs Tinkercloud's head alongside `ray start`: KubeRay passes the generated
command in a variable if it is configured not to run it itself. Without workers there is only the
head.

Ray's logical CPUs represent ranks: a trainer pod has one per rank that it holds, other pods have
none, so Ray places ranks only in trainer pods.

Kueue owns `spec.suspend` if a queue is set, so the operator never sets it: a session is suspended
by deleting its RayCluster.
"""

from tinkercloud_crds import labels
from tinkercloud_crds.pods.shapes import OBJECT_STORE_SHARE, Resources, SamplerShape, TrainerShape
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.children import engines
from tinkercloud_operator.children.pods import (
    CHECKPOINT_FOLDER,
    CLEAR_SHARED_MEMORY,
    CONFIG_FOLDER,
    OUTLIVE_HEAD,
    Build,
    Json,
    container,
    environment_of,
    pod_template,
    probe,
    with_extras,
)
from tinkercloud_operator.children.support_objects import head_json
from tinkercloud_operator.spec.pinned import to_annotation
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.resolved import RAY_NODE, ResolvedSpec

API_VERSION = "ray.io/v1"

_START_HEAD = (
    f"{CLEAR_SHARED_MEMORY}; "
    'eval "$KUBERAY_GEN_RAY_START_CMD" & '
    f"exec python -m tinkercloud_worker {CONFIG_FOLDER}/head.json"
)
_PORTS = (
    ("http", labels.HEAD_PORT),
    ("gcs-server", 6379),
    ("dashboard", 8265),
    ("client", 10001),
    ("metrics", 8080),
)
"""Ports of the head's container; all but the first are Ray's."""
_RAY_PARAMS = {
    # Ray's startup timeout of a node is 30 seconds. With fixed ports it does not wait for its
    # agents, which take longer than that on busy cores.
    "dashboard-agent-grpc-port": "52366",
    "runtime-env-agent-port": "52367",
}
"""Parameters of every `ray start`."""
_RAYLET_PORT = 52368
_RAY_HEAD_PARAMS = {
    # No Ray task runs on the head: its cores belong to the sequencer or the CPU engine.
    "num-cpus": "0",
    "num-gpus": "0",
    "include-dashboard": "false",
    # KubeRay omits values of "false", and this is on by default.
    "include-log-monitor": "0",
}
_LEAST_OBJECT_STORE = 100 << 20
"""Bytes; Ray requires at least three quarters of it."""
_STARTUP_SECONDS = 1800
"""Startup time after which a head's container is restarted; loading the model comes later."""
_WORKER_START_SECONDS = 120
"""Startup time of a worker's raylet, before its liveness is checked."""


def ray_cluster(build: Build) -> Json:
    """Return the RayCluster of a session."""
    placement = build.resolved.placement
    queue = placement.queue_name
    return {
        "apiVersion": API_VERSION,
        "kind": "RayCluster",
        "metadata": {
            "name": build.names.ray_cluster,
            "labels": {
                **(placement.ray_cluster_labels or {}),
                **({labels.QUEUE_LABEL: queue} if queue is not None else {}),
            },
            "annotations": {
                **(placement.ray_cluster_annotations or {}),
                labels.STARTED_WITH: to_annotation(build.resolved),
                labels.HEAD_CONFIG: head_json(build),
            },
        },
        "spec": {
            "rayVersion": build.settings.ray_version,
            "authOptions": {"mode": "token", "secretName": build.names.token_secret},
            "headGroupSpec": _head(build),
            "workerGroupSpecs": [*_trainers(build), *_samplers(build)],
        },
    }


def updatable_fields(wanted: Manifest, live: Manifest | None) -> Manifest:
    """Return the part of a RayCluster that may be updated on the live object.

    Kueue adds fields to the pods that it admits, and evicts a RayCluster whose pod templates
    change. On an admitted one only the numbers of pods are restored, which is worth an eviction;
    other changes wait until the RayCluster is queued again.
    """
    if live is None or live.get("spec", {}).get("suspend") is not False:
        return wanted
    if labels.QUEUE_LABEL not in live["metadata"].get("labels", {}):
        return wanted
    groups = [
        {"groupName": group["groupName"], "replicas": group["replicas"]}
        for group in wanted["spec"]["workerGroupSpecs"]
    ]
    owners = {"ownerReferences": wanted["metadata"]["ownerReferences"]}
    return {"metadata": owners, "spec": {"workerGroupSpecs": groups}}


def _head(build: Build) -> Json:
    head = build.resolved.base_model.head
    body = container(build, "head", head.image, head.resources, gpus=0) | {
        "command": ["/bin/bash", "-c", _START_HEAD],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _PORTS
        ],
        "startupProbe": probe(_get("/healthz"), period=2, failures=_STARTUP_SECONDS // 2),
        "readinessProbe": probe(_get("/readyz"), period=5, failures=2),
        "livenessProbe": probe(_get("/healthz"), period=10, failures=6),
    }
    # Only the head accesses the checkpoint store and has its credentials.
    body["envFrom"] = environment_of(build.settings.checkpoint_secret)
    mounts = [*_checkpoint_mounts(build), *engines.head_mounts(build)]
    body["volumeMounts"] = [*body["volumeMounts"], *mounts]
    template = pod_template(build, "head", body, head.resources)
    template["spec"]["volumes"].extend([*_checkpoint_volumes(build), *engines.volumes(build)])
    template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] = "true"
    # Process 1 of a container ignores SIGTERM until it installs a handler, which the head does only
    # after seconds of imports, and must reap orphans of Ray's processes. With a shared process
    # namespace the head is not process 1.
    template["spec"]["shareProcessNamespace"] = True
    params = _RAY_PARAMS | _RAY_HEAD_PARAMS | _object_store(head.resources)
    return {"rayStartParams": params, "template": template}


def _checkpoint_volumes(build: Build) -> list[Json]:
    claim = build.settings.checkpoint_claim
    if claim is None:
        return []
    return [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}]


def _checkpoint_mounts(build: Build) -> list[Json]:
    return [
        {"name": volume["name"], "mountPath": CHECKPOINT_FOLDER}
        for volume in _checkpoint_volumes(build)
    ]


def _object_store(resources: Resources) -> Json:
    """Return the size of a node's object store: Ray's own choice outgrows /dev/shm."""
    size = int(parse_quantity(resources.shared_memory) * OBJECT_STORE_SHARE)
    return {"object-store-memory": str(max(_LEAST_OBJECT_STORE, size))}


def _trainers(build: Build) -> list[Json]:
    trainer = build.resolved.trainer
    if trainer is None or trainer.replicas == 0:
        return []
    if build.resolved.engines_per_trainer:
        return [_trainer_with_engines(build, trainer, number) for number in range(trainer.replicas)]
    return [_trainer(build, trainer)]


def _trainer(build: Build, trainer: TrainerShape) -> Json:
    ranks = trainer.ranks_per_replica
    group = _group(build, "trainer", trainer, trainer.gpus_per_replica, ranks)
    # Otherwise Ray would give every rank one thread, for its one logical CPU.
    threads = max(1, int(parse_quantity(trainer.resources.cpu)) // ranks)
    [worker] = group["template"]["spec"]["containers"]
    worker["env"] = [*worker["env"], {"name": "OMP_NUM_THREADS", "value": str(threads)}]
    return group


def _trainer_with_engines(build: Build, trainer: TrainerShape, number: int) -> Json:
    """Return the group of one trainer pod with engines, which sample while it does not train."""
    alone = {"replicas": 1, "resources": _with_room_for_engines(build.resolved, trainer.resources)}
    group = _with_engines(
        build, _trainer(build, trainer.model_copy(update=alone)), "trainer", number
    )
    # KubeRay derives these from container limits that are not set here. The remaining shared memory
    # is for the engines.
    own = {"num-gpus": str(trainer.gpus_per_replica), **_object_store(trainer.resources)}
    return group | {"rayStartParams": group["rayStartParams"] | own}


def _with_room_for_engines(resolved: ResolvedSpec, own: Resources) -> Resources:
    """Return the resources of a trainer's container, with volumes large enough for its engines."""
    everyone = [own, *[resolved.sampler.resources] * resolved.engines_per_trainer]
    shared = sum(parse_quantity(each.shared_memory) for each in everyone)
    # The base model is stored there once for all containers.
    scratch = max((each.scratch for each in everyone), key=parse_quantity)
    return own.model_copy(
        update={"shared_memory": f"{round(shared / 2**20)}Mi", "scratch": scratch}
    )


def _samplers(build: Build) -> list[Json]:
    found = [_engine(build, number) for number in range(build.resolved.most_samplers)]
    for number, group in enumerate(found):
        if number >= build.resolved.samplers:
            # KubeRay restores `replicas` to these bounds.
            group["minReplicas"] = 0
            group["replicas"] = int(number < build.engine_pods)
            group["template"]["metadata"]["labels"][labels.SCALED_LABEL] = "true"
    return found


def _engine(build: Build, number: int) -> Json:
    """Return the group of one engine with its own pod."""
    sampler = build.resolved.sampler
    needed = {"cpu": RAY_NODE.cpu, "memory": RAY_NODE.memory}
    ray_node = {
        "replicas": 1,
        "image": None,
        "resources": sampler.resources.model_copy(update=needed),
        "extended_resources": (),
        "environment": (),
    }
    group = _group(build, "sampler", sampler.model_copy(update=ray_node), gpus=0, ranks=0)
    # The shared memory is for the engine.
    params = group["rayStartParams"] | {"object-store-memory": str(_LEAST_OBJECT_STORE)}
    return _with_engines(build, group, "sampler", number) | {"rayStartParams": params}


def _with_engines(build: Build, group: Json, component: str, number: int) -> Json:
    """Add engines to a group of one pod: only a group of its own can have a stable host name."""
    pod = group["template"]["spec"]
    pod["containers"].extend(engines.engines(build))
    pod["volumes"].extend(engines.volumes(build))
    pod["hostname"] = engines.host_name(component, number)
    pod["subdomain"] = build.names.engines
    return group | {"groupName": pod["hostname"]}


def _group(
    build: Build, component: str, worker: TrainerShape | SamplerShape, gpus: int, ranks: int
) -> Json:
    image = worker.image or build.resolved.base_model.head.image
    # KubeRay appends its own command. Its default probes query Ray's dashboard agent, which
    # only works if Ray's dashboard is installed; these check the raylet instead.
    alive = probe({"tcpSocket": {"port": _RAYLET_PORT}}, period=5, failures=12)
    body = container(build, "worker", image, worker.resources, gpus) | {
        "command": [CLEAR_SHARED_MEMORY],
        "readinessProbe": alive,
        "livenessProbe": alive | {"initialDelaySeconds": _WORKER_START_SECONDS},
        "lifecycle": OUTLIVE_HEAD,
    }
    template = pod_template(build, component, body, worker.resources)
    # Extras are added last: the init container that downloads the model must not get them.
    [first] = template["spec"]["containers"]
    template["spec"]["containers"] = [with_extras(first, worker)]
    # As process 1, KubeRay's shell would ignore SIGTERM.
    template["spec"]["shareProcessNamespace"] = True
    params = {"node-manager-port": str(_RAYLET_PORT), "num-cpus": str(ranks)}
    return {
        "groupName": component,
        "replicas": worker.replicas,
        "minReplicas": worker.replicas,
        "maxReplicas": worker.replicas,
        "rayStartParams": _RAY_PARAMS | params | _object_store(worker.resources),
        "template": template,
    }


def _get(path: str) -> Json:
    return {"httpGet": {"path": path, "port": labels.HEAD_PORT}}
