"""The RayCluster: a head, and groups of trainers and samplers.

The head container runs Tinkercloud's head beside `ray start` (KubeRay hands the generated command
over in a variable when it is told not to run it itself). Without workers there is the head alone.
Ray's logical CPUs are ranks: a trainer pod has as many as it is to hold, the others none, so that
ranks are where they belong.
Kueue owns `spec.suspend` wherever a queue is named, so it is never set here: a session is
suspended by deleting its RayCluster.
"""

from tinkercloud_crds import labels
from tinkercloud_crds.shapes import OBJECT_STORE_SHARE, Resources, SamplerShape, TrainerShape
from tinkercloud_operator.children import engines
from tinkercloud_operator.children.pods import (
    CHECKPOINT_FOLDER,
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
from tinkercloud_operator.spec.snapshot import Manifest

API_VERSION = "ray.io/v1"

_START_HEAD = (
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
"""Of the head's container; all but the first are Ray's."""
_RAY_PARAMS = {
    # Ray gives a node 30 seconds to come up. With agents on ports that are known beforehand it does
    # not wait for them, which on busy cores take longer than that.
    "dashboard-agent-grpc-port": "52366",
    "runtime-env-agent-port": "52367",
}
"""Of every `ray start`."""
_RAYLET_PORT = 52368
_RAY_HEAD_PARAMS = {
    # No Ray task runs on the head: its cores are the sequencer's, or the CPU engine's.
    "num-cpus": "0",
    "num-gpus": "0",
    "include-dashboard": "false",
    # KubeRay leaves out what is "false", and this is on unless it is told otherwise.
    "include-log-monitor": "0",
}
_LEAST_OBJECT_STORE = 100 << 20
"""Bytes; Ray refuses less than three quarters of it."""
_STARTUP_SECONDS = 1800
"""How long a container may take to serve; loading the model comes after that."""
_WORKER_START_SECONDS = 120
"""How long a worker may take to start its raylet before it is asked whether it lives."""


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
    """Return what of a RayCluster is put right where the live one differs.

    Kueue adds to the pods that it admits, and evicts a RayCluster whose pods are described anew. Of
    one that it has admitted only the numbers of pods are updatable_fields as wanted, which is worth that; the
    rest waits until the RayCluster queues again.
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
    # The store of checkpoints is the head's alone, with its credentials.
    body["envFrom"] = environment_of(build.settings.checkpoint_secret)
    mounts = [*_checkpoint_mounts(build), *engines.head_mounts(build)]
    body["volumeMounts"] = [*body["volumeMounts"], *mounts]
    template = pod_template(build, "head", body, head.resources)
    template["spec"]["volumes"].extend([*_checkpoint_volumes(build), *engines.volumes(build)])
    template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] = "true"
    # The first process of a container is deaf to SIGTERM until it has a handler, which the head has
    # only after seconds of imports, and must bury what Ray's processes leave. Here it is not first.
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
    # Ray would give every rank one thread, the one logical CPU it takes.
    threads = max(1, int(parse_quantity(trainer.resources.cpu)) // ranks)
    [worker] = group["template"]["spec"]["containers"]
    worker["env"] = [*worker["env"], {"name": "OMP_NUM_THREADS", "value": str(threads)}]
    return group


def _trainer_with_engines(build: Build, trainer: TrainerShape, number: int) -> Json:
    """Return the group of one trainer pod, on whose GPUs engines sample while it does not train."""
    alone = {"replicas": 1, "resources": _with_room_for_engines(build.resolved, trainer.resources)}
    group = _with_engines(
        build, _trainer(build, trainer.model_copy(update=alone)), "trainer", number
    )
    # KubeRay reads a limit that is not there. The rest of the shared memory is the engines'.
    own = {"num-gpus": str(trainer.gpus_per_replica), **_object_store(trainer.resources)}
    return group | {"rayStartParams": group["rayStartParams"] | own}


def _with_room_for_engines(resolved: ResolvedSpec, own: Resources) -> Resources:
    """Return what a trainer's container needs, with volumes that its pod's engines use too."""
    everyone = [own, *[resolved.sampler.resources] * resolved.engines_per_trainer]
    shared = sum(parse_quantity(each.shared_memory) for each in everyone)
    # The base model lies on it once, whoever reads it.
    scratch = max((each.scratch for each in everyone), key=parse_quantity)
    return own.model_copy(
        update={"shared_memory": f"{round(shared / 2**20)}Mi", "scratch": scratch}
    )


def _samplers(build: Build) -> list[Json]:
    return [_engine(build, number) for number in range(build.resolved.samplers)]


def _engine(build: Build, number: int) -> Json:
    """Return the group of one engine that has a pod to itself."""
    sampler = build.resolved.sampler
    needed = {"cpu": RAY_NODE.cpu, "memory": RAY_NODE.memory}
    beside = {
        "replicas": 1,
        "image": None,
        "resources": sampler.resources.model_copy(update=needed),
        "extended_resources": (),
        "environment": (),
    }
    group = _group(build, "sampler", sampler.model_copy(update=beside), gpus=0, ranks=0)
    # Shared memory is the engine's.
    params = group["rayStartParams"] | {"object-store-memory": str(_LEAST_OBJECT_STORE)}
    return _with_engines(build, group, "sampler", number) | {"rayStartParams": params}


def _with_engines(build: Build, group: Json, component: str, number: int) -> Json:
    """Return a group of one pod that has engines: pods of one group can't have names."""
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
    # KubeRay names the container's command. Its probes would ask Ray's dashboard agent, which
    # serves nothing unless Ray's dashboard is installed; a worker lives as its raylet does.
    alive = probe({"tcpSocket": {"port": _RAYLET_PORT}}, period=5, failures=12)
    body = container(build, "worker", image, worker.resources, gpus) | {
        "readinessProbe": alive,
        "livenessProbe": alive | {"initialDelaySeconds": _WORKER_START_SECONDS},
        "lifecycle": OUTLIVE_HEAD,
    }
    template = pod_template(build, component, body, worker.resources)
    # What downloads the model has a part of the container's environment, and none of this.
    [first] = template["spec"]["containers"]
    template["spec"]["containers"] = [with_extras(first, worker)]
    # KubeRay's shell would be deaf to SIGTERM as the first process.
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
