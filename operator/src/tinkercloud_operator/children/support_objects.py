"""What surrounds the pods: Service, Secret, configuration, policies, budget, claims of GPUs."""

from tinkercloud_crds import labels
from tinkercloud_operator.children import engines
from tinkercloud_operator.children.pods import (
    GPU_CLAIM,
    SCRATCH_FOLDER,
    TOKEN_FOLDER,
    Build,
    Json,
    model_path,
)
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.resolved import ResolvedSpec
from tinkercloud_protocol.launch import (
    BaseModelSource,
    HeadConfig,
    Limits,
    Listen,
    Timings,
    TrainerConfig,
)

SECRET_KEYS = (labels.TOKEN_KEY, "auth_token")
"""Entries of the Secret: the head's token, and the same under the name Ray wants it by."""

_TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for what a container says about its end, unless it is told otherwise."""
_SNAPSHOT_SHARE = 0.5
"""Of the head's scratch space, what weights to sample from may have; half as much where the base
model lies there too. The latest and what is in use stay beyond it, and new ones are being
written."""
_DNS_PORTS = [
    {"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")
]
"""OpenShift's DNS pods listen at 5353, and its network (OVN) judges what is sent to a Service by
the pod that it reaches."""


def token_secret(build: Build) -> Json:
    """Return the Secret with the head's token, without the token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": build.names.token_secret},
        "type": "Opaque",
    }


def head_config(build: Build) -> HeadConfig:
    """Return what the head is told at birth."""
    settings, base_model = build.settings, build.resolved.base_model
    return HeadConfig(
        head=build.names.session,
        model=BaseModelSource(name=base_model.model_name, path=model_path(base_model)),
        token_file=f"{TOKEN_FOLDER}/{labels.TOKEN_KEY}",
        checkpoint_root=settings.checkpoint_root,
        scratch_dir=f"{SCRATCH_FOLDER}/head",
        reason_file=_TERMINATION_LOG,
        listen=Listen(host="0.0.0.0", port=labels.HEAD_PORT),  # noqa: S104 - a pod's own address
        trainer=_trainer_config(build.resolved),
        sampler=engines.sampler_config(build),
        limits=Limits(
            max_lora_rank=base_model.limits.max_lora_rank,
            max_context_length=base_model.max_context_length,
            max_snapshot_bytes=_snapshot_bytes(build.resolved),
            max_placed_bytes=_placed_bytes(build.resolved),
        ),
        timings=Timings(
            drain_seconds=settings.drain_seconds, suspend_seconds=settings.suspend_seconds
        ),
    )


def _snapshot_bytes(resolved: ResolvedSpec) -> int:
    """Return what the head may keep of weights to sample from, next to what else is on its disk.

    A pod whose scratch space overflows is evicted, and with it goes the run.
    """
    base_model = resolved.base_model
    has_base_model = base_model.source.volume is None and resolved.head_computes
    share = _SNAPSHOT_SHARE / 2 if has_base_model else _SNAPSHOT_SHARE
    return max(1, int(parse_quantity(base_model.head.resources.scratch) * share))


def _placed_bytes(resolved: ResolvedSpec) -> int:
    """Return what a trainer pod may keep of whole models; see `_snapshot_bytes`."""
    if resolved.trainer is None:
        return Limits().max_placed_bytes
    share = _SNAPSHOT_SHARE / 2 if resolved.base_model.source.volume is None else _SNAPSHOT_SHARE
    return max(1, int(parse_quantity(resolved.trainer.resources.scratch) * share))


def _trainer_config(resolved: ResolvedSpec) -> TrainerConfig:
    trainer = resolved.trainer
    if trainer is None:
        return TrainerConfig(backend="none", dtype=resolved.base_model.trainer.dtype)
    parallelism = trainer.parallelism
    return TrainerConfig(
        backend=trainer.backend,
        ranks=trainer.replicas * trainer.ranks_per_replica,
        tensor_parallel=parallelism.tensor,
        pipeline_parallel=parallelism.pipeline,
        context_parallel=parallelism.context,
        expert_parallel=parallelism.expert,
        device="cuda" if trainer.gpus_per_replica else "cpu",
        sharded=trainer.sharded,
        dtype=trainer.dtype,
        max_batch_tokens=trainer.max_batch_tokens,
        # What fits a GPU is planned for layers that are computed again.
        max_kept_tokens=0 if trainer.gpus_per_replica else None,
        start_timeout_seconds=trainer.start_timeout_seconds,
    )


def head_json(build: Build) -> str:
    """Return the head's configuration as it reads it."""
    return build.head_config or head_config(build).model_dump_json(exclude_defaults=True)


def config_map(build: Build) -> Json:
    """Return the ConfigMap with the head's configuration."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": build.names.head_config},
        "data": {"head.json": head_json(build)},
    }


def head_service(build: Build) -> Json:
    """Return the Service of the head.

    KubeRay's own publishes addresses of heads that are not ready; this one does not.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": build.names.head_service},
        "spec": {
            "type": "ClusterIP",
            "selector": {
                labels.SESSION_LABEL: build.names.session,
                labels.COMPONENT_LABEL: "head",
            },
            "ports": [
                {
                    "name": "http",
                    "port": labels.HEAD_PORT,
                    "targetPort": labels.HEAD_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def network_policy(build: Build) -> Json:
    """Return the NetworkPolicy: among themselves; heads from API server and operator; DNS; stores.

    Object stores, the model hub and servers of others are reached at some ports; no policy can name
    their addresses.
    """
    own = {"podSelector": {"matchLabels": {labels.SESSION_LABEL: build.names.session}}}
    clients = [{"podSelector": {"matchLabels": wanted}} for wanted in build.settings.client_labels]
    ports = sorted({*build.settings.outgoing_ports, *engines.external_ports(build)})
    # A rule that names no ports is about all of them.
    stores = [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}] if ports else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": build.names.network_policy},
        "spec": {
            "podSelector": {"matchLabels": {labels.SESSION_LABEL: build.names.session}},
            "policyTypes": ["Ingress", "Egress"],
            # Among themselves at every port: Ray's are many. In a process group an engine's ranks
            # connect to a store at the head, and of any two gloo ranks the one with the higher
            # address to the other, all at ports that the system chooses.
            "ingress": [
                {"from": [own]},
                {"from": clients, "ports": [{"protocol": "TCP", "port": labels.HEAD_PORT}]},
            ],
            "egress": [
                {"to": [own]},
                {"ports": _DNS_PORTS},
                *stores,
            ],
        },
    }


def claim_templates(build: Build) -> list[Json]:
    """Return the ResourceClaimTemplate by which each pod claims GPUs for its containers to share.

    There is none where each container asks for GPUs of its own.
    """
    devices = build.resolved.devices
    if devices is None:
        return []
    exactly = {
        "deviceClassName": devices.class_name,
        "allocationMode": "ExactCount",
        "count": devices.count,
    }
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": build.names.claim_template(devices)},
            "spec": {
                "spec": {"devices": {"requests": [{"name": GPU_CLAIM, "exactly": exactly}]}},
            },
        }
    ]


def disruption_budget(build: Build) -> Json:
    """Return the PodDisruptionBudget: no pod of a session is evicted for convenience.

    A number of pods, not `maxUnavailable`: that one needs the scale subresource, which
    RayClusters lack. A pod that is not ready serves nobody, and holds up no drain.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": build.names.disruption_budget},
        "spec": {
            "minAvailable": sum(kind.count for kind in build.resolved.pods),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {labels.SESSION_LABEL: build.names.session}},
        },
    }
