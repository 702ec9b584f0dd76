"""The common parts of a session's pods: containers, volumes, security, placement.

All pods meet the Restricted Pod Security Standard: non-root, no privileges, a read-only root file
system. They mount no service account token.
"""

from dataclasses import dataclass
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.names import Names
from tinkercloud_crds.pods.placement import Placement, TopologyAffinity
from tinkercloud_crds.pods.shapes import Resources, SamplerShape, TrainerShape
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.resolved import ResolvedSpec

Json = dict[str, Any]

CONFIG_FOLDER = "/etc/tinkercloud"
TOKEN_FOLDER = "/etc/tinkercloud-token"  # noqa: S105
SCRATCH_FOLDER = "/scratch"
MODEL_FOLDER = "/models"
CHECKPOINT_FOLDER = "/checkpoints"
CA_FOLDER = "/etc/tinkercloud-ca"
FETCHED_MODEL_FOLDER = f"{SCRATCH_FOLDER}/model"

GPU_RESOURCE = "nvidia.com/gpu"
GPU_CLAIM = "gpus"
"""Name of a pod's claim of devices."""

RAY_HEAD_VARIABLE = "FQ_RAY_IP"
"""Variable with the address of the Ray head, which KubeRay only sets in Ray's own container."""
OUTLIVE_HEAD: Json = {
    "preStop": {
        "exec": {
            "command": [
                *("/bin/bash", "-c"),
                f'head=$(getent hosts "${RAY_HEAD_VARIABLE}" || echo "${RAY_HEAD_VARIABLE}"); '
                'while (: < "/dev/tcp/${head%% *}/6379") 2> /dev/null; do sleep 1; done',
            ]
        }
    }
}
"""Lifecycle of containers that the head needs while it finishes its work and saves its state: when
a node is drained, all pods are asked to stop at the same time. The name is resolved once: later it
may be that of a new head, which does not need these containers."""

CLEAR_SHARED_MEMORY = (
    'if [ "$(< /proc/1/comm)" = pause ] && hash grep find; then'
    " for file in /dev/shm/{torch_,psm_,nccl-,cuda.shm.}*; do"
    ' name=${file##*/}; [ -f "$file" ] && [ -O "$file" ]'
    ' && ! grep -qsF "/$name" /proc/[0-9]*/maps'
    ' && [ -z "$(find /proc/[0-9]*/fd -lname "*/$name" 2> /dev/null)" ] && rm -f "$file";'
    " done; fi; true"
)
"""Commands of bash that a container starts with. They remove segments of shared memory that torch,
Python, NCCL and CUDA leave behind when their process is killed: /dev/shm outlives a container, and
counts as its memory. A segment that any process of the pod has mapped or opened is kept. Only in a
pod whose containers share their process namespace, in which process 1 is the sandbox's, are all
processes visible that may use it."""


def model_path(base_model: BaseModelSpec) -> str:
    """Return the folder of the base model inside a pod."""
    volume = base_model.source.volume
    return f"{MODEL_FOLDER}/{volume.path}" if volume is not None else FETCHED_MODEL_FOLDER


@dataclass(frozen=True, slots=True)
class Build:
    """The input from which children are built."""

    names: Names
    resolved: ResolvedSpec
    settings: Settings
    head_config: str | None = None
    """Configuration that the running head received; None derives it from the spec."""
    engines: int | None = None
    """Number of sampler pods, if it follows the load; None for the minimum."""

    @property
    def engine_pods(self) -> int:
        """Number of sampler pods."""
        return self.resolved.samplers if self.engines is None else self.engines


def pod_template(build: Build, component: str, container: Json, resources: Resources) -> Json:
    """Return the pod template of one group."""
    settings, source = build.settings, build.resolved.base_model.source
    placement = build.resolved.placement_of(component)
    stop_seconds = settings.stop_seconds_of(build.resolved.base_model.head)
    spec: Json = {
        "serviceAccountName": settings.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": stop_seconds + 15,
        "securityContext": pod_security(settings),
        "containers": [_with_scratch(container, resources, settings)],
        "volumes": _volumes(build, resources),
        **_placement(build, component),
    }
    devices = build.resolved.devices
    if devices is not None and component != "head":
        template = build.names.claim_template(devices.class_name, devices.count)
        spec["resourceClaims"] = [{"name": GPU_CLAIM, "resourceClaimTemplateName": template}]
    if source.volume is None:
        needs_weights = component != "head" or build.resolved.head_computes
        part = [] if needs_weights else ["description"]
        spec["initContainers"] = [_model_fetcher(build, container, part)]
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return {
        "metadata": {
            "labels": {
                **settings.pod_labels,
                **(placement.pod_labels or {}),
                labels.SESSION_LABEL: build.names.session,
                labels.COMPONENT_LABEL: component,
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
            },
            "annotations": {
                **(placement.pod_annotations or {}),
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "true",
            },
        },
        "spec": spec,
    }


def container(build: Build, name: str, image: str, resources: Resources, gpus: int) -> Json:
    """Return a container that meets the security standard, without credentials of stores."""
    policy = build.settings.image_pull_policy
    return {
        "name": name,
        "image": image,
        **({} if policy is None else {"imagePullPolicy": policy}),
        "resources": _needs(build, resources, gpus),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": _mounts(build.settings),
        "env": [
            *ca_variables(build.settings),
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - a volume of the pod's own
            {"name": "OMP_WAIT_POLICY", "value": "PASSIVE"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            # On busy cores a rank's process, or the GCS, may take longer to start than Ray's
            # default timeouts.
            {"name": "RAY_worker_register_timeout_seconds", "value": "600"},
            {"name": "RAY_gcs_server_port_wait_time_s", "value": "120"},
            # Ray's own monitor kills a rank when memory, with the page cache of model files and
            # /dev/shm, reaches 95 % of the limit, and no status shows it. The kernel kills later,
            # does not count what it can free, and the session is reported as OOMKilled.
            {"name": "RAY_memory_monitor_refresh_ms", "value": "0"},
        ],
        # The pod's status then shows the last lines of the log of a failed container.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def with_extras(container: Json, worker: TrainerShape | SamplerShape) -> Json:
    """Return a worker's container with its extra resources and environment variables."""
    needs = container["resources"]
    amounts = {resource.name: resource.amount for resource in worker.extended_resources}
    # Kubernetes requires equal requests and limits for extended resources.
    alike = {kind: needs[kind] | amounts for kind in ("requests", "limits")}
    variables = [variable.model_dump() for variable in worker.environment]
    return container | {"resources": needs | alike, "env": [*container["env"], *variables]}


def _needs(build: Build, resources: Resources, gpus: int) -> Json:
    """Return a container's resources: GPUs directly, or the pod's claim that holds its GPUs."""
    requests: Json = {"cpu": resources.cpu, "memory": resources.memory}
    limits = _limits(build.settings, requests)
    if gpus and build.resolved.devices is not None:
        return {"requests": requests, "limits": limits, "claims": [{"name": GPU_CLAIM}]}
    if gpus:
        limits[GPU_RESOURCE] = requests[GPU_RESOURCE] = str(gpus)
    return {"requests": requests, "limits": limits}


def _limits(settings: Settings, requests: Json) -> Json:
    """Return the limits of a container; without a CPU limit it can use idle cores."""
    return dict(requests) if settings.limit_cores else {"memory": requests["memory"]}


def ca_variables(settings: Settings) -> list[Json]:
    """Return the variables that point OpenSSL, rustls and requests to the trusted CAs."""
    if settings.ca_config_map is None:
        return []
    path = f"{CA_FOLDER}/{settings.ca_key}"
    return [{"name": name, "value": path} for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]


def _with_scratch(container: Json, resources: Resources, settings: Settings) -> Json:
    """Return a pod's first container, with a request for the pod's scratch space."""
    if not settings.reserve_scratch:
        return container
    needs = container["resources"]
    requests = {**needs["requests"], "ephemeral-storage": resources.scratch}
    return {**container, "resources": {**needs, "requests": requests}}


def probe(handler: Json, *, period: int, failures: int) -> Json:
    """Return a probe that runs every `period` seconds and fails after `failures` in a row."""
    return handler | {
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def environment_of(*secrets: str | None) -> list[Json]:
    """Return the `envFrom` entries of Secrets; for duplicate keys the last one wins."""
    return [{"secretRef": {"name": name}} for name in secrets if name is not None]


def pod_security(settings: Settings) -> Json:
    """Return the security context of a pod."""
    user, group = settings.run_as_user, settings.fs_group
    ids: Json = {} if user is None else {"runAsUser": user, "runAsGroup": user}
    if group is not None:
        # Otherwise the ownership of every file is checked whenever a volume is mounted.
        ids |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}


def _mounts(settings: Settings) -> list[Json]:
    authorities = {"name": "ca-bundle", "mountPath": CA_FOLDER, "readOnly": True}
    return [
        *([] if settings.ca_config_map is None else [authorities]),
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
        {"name": "scratch", "mountPath": SCRATCH_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - as above
        {"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True},
    ]


def _volumes(build: Build, resources: Resources) -> list[Json]:
    names = build.names
    volume = build.resolved.base_model.source.volume
    model: Json = (
        {"emptyDir": {"sizeLimit": "1Mi"}}
        if volume is None
        else {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": True}}
    )
    authorities = build.settings.ca_config_map
    bundle = {"name": "ca-bundle", "configMap": {"name": authorities}}
    return [
        *([] if authorities is None else [bundle]),
        {"name": "config", "configMap": {"name": names.head_config}},
        {"name": "token", "secret": {"secretName": names.token_secret, "defaultMode": 0o440}},
        {"name": "scratch", "emptyDir": {"sizeLimit": resources.scratch}},
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": resources.shared_memory},
        },
        {"name": "model", **model},
    ]


def _model_fetcher(build: Build, container: Json, part: list[str]) -> Json:
    """Return the init container that downloads the model, or a part of it.

    It has the credentials of the checkpoint store, since models may be stored there too, and those
    of the model's own source, which take precedence and which no other container has.
    """
    source = build.resolved.base_model.source
    where = source.uri if source.uri is not None else f"hub:{source.hub}"
    if source.revision is not None:
        where = f"{where}@{source.revision}"
    requests = {"cpu": "1", "memory": build.settings.download_memory}
    kept = ("image", "imagePullPolicy", "securityContext", "env", "terminationMessagePolicy")
    return {
        "name": "fetch-model",
        "command": [
            *("python", "-m", "tinkercloud_worker.fetch_model"),
            *(where, FETCHED_MODEL_FOLDER, *part),
        ],
        "resources": {"requests": requests, "limits": _limits(build.settings, requests)},
        "volumeMounts": _mounts(build.settings),
        "envFrom": environment_of(build.settings.checkpoint_secret, source.secret_name),
        **{key: container[key] for key in kept if key in container},
    }


def _placement(build: Build, component: str) -> Json:
    placement = build.resolved.placement_of(component)
    spec: Json = {}
    if placement.node_selector:
        spec["nodeSelector"] = dict(placement.node_selector)
    if affinity := _affinity(build, component, placement):
        spec["affinity"] = affinity
    if placement.tolerations:
        spec["tolerations"] = [
            toleration.model_dump(by_alias=True, exclude_none=True)
            for toleration in placement.tolerations
        ]
    if placement.priority_class_name is not None:
        spec["priorityClassName"] = placement.priority_class_name
    if placement.runtime_class_name is not None:
        spec["runtimeClassName"] = placement.runtime_class_name
    if placement.scheduler_name is not None:
        spec["schedulerName"] = placement.scheduler_name
    return spec


def _affinity(build: Build, component: str, placement: Placement) -> Json:
    affinity: Json = {}
    if placement.node_affinity:
        terms = [term.model_dump(by_alias=True) for term in placement.node_affinity]
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    if placement.topology_affinity is not None:
        role = build.resolved.role_placement(component)
        near = {labels.SESSION_LABEL: build.names.session}
        if role is not None and role.topology_affinity is not None:
            near[labels.COMPONENT_LABEL] = component
        affinity["podAffinity"] = _near(placement.topology_affinity, near)
    return affinity


def _near(topology: TopologyAffinity, pods: dict[str, str]) -> Json:
    """Return an affinity to pods with these labels; the first such pod can run anywhere."""
    term = {"labelSelector": {"matchLabels": pods}, "topologyKey": topology.key}
    if topology.enforcement == "Required":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
