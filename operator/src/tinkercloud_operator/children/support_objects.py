"""The objects that pods depend on: Service, Secret, configuration, policies, claims."""

from tinkercloud_crds import labels
from tinkercloud_crds.pods.shapes import (
    JOURNAL_SHARE,
    JOURNALS_SHARE,
    WHOLE_MODEL_SHARE,
    TrainerShape,
)
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
from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    Limits,
    Listen,
    Timings,
    TrainerConfig,
)

SECRET_KEYS = (labels.TOKEN_KEY, "auth_token")
"""Keys of the Secret: the head's token, and the same token under the key that Ray reads."""

_TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default path of the termination message of a container."""
_VERSION_SHARE = 0.5
"""Share of the head's scratch space for sampler versions; half of it if the base model is stored
there too. The latest version and those in use do not count, and new ones are being written."""
_WHOLE_VERSION_SHARE = 0.15
"""The same of a head whose scratch space has a whole model's journal (`WHOLE_MODEL_SHARE`). Its
only model never leaves, so that idle models have no share."""
_PAGED_SHARE = 0.25
"""Share of the scratch space of a pod that trains for idle models; half of it if the base model is
stored there too."""
DNS_PORTS = [
    {"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")
]
"""OpenShift's DNS pods listen at 5353, and its network (OVN) applies policies to the pod behind a
Service."""


def token_secret(build: Build) -> Json:
    """Return the Secret of the head's token, without the token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": build.names.token_secret},
        "type": "Opaque",
    }


def head_config(build: Build) -> HeadConfig:
    """Return the configuration that the head reads at startup."""
    settings, base_model = build.settings, build.resolved.base_model
    keeps_whole = _keeps_whole_model(build.resolved)
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
            max_snapshot_bytes=_head_scratch(
                build.resolved, _WHOLE_VERSION_SHARE if keeps_whole else _VERSION_SHARE
            ),
            max_placed_bytes=_placed_bytes(build.resolved),
            max_paged_bytes=_paged_bytes(build.resolved),
        ),
        timings=Timings(
            drain_seconds=settings.drain_seconds,
            suspend_seconds=settings.suspend_seconds_of(base_model.head),
        ),
        autosave=AutosaveConfig(**base_model.head.autosave.model_dump()),
        otlp_endpoint=settings.otlp_endpoint,
        **_durability(build.resolved),
    )


def _durability(resolved: ResolvedSpec) -> Json:
    """Return the fields of the head's configuration that keep journals, if it keeps any."""
    shape = resolved.base_model.head
    if shape.durability.level == "none":
        return {}
    keeps_whole = _keeps_whole_model(resolved)
    share = JOURNALS_SHARE + (WHOLE_MODEL_SHARE if keeps_whole else 0)
    largest = _head_scratch(resolved, JOURNAL_SHARE)
    config = DurabilityConfig(
        **shape.durability.model_dump(),
        max_journal_bytes=min(DurabilityConfig().max_journal_bytes, largest),
        max_disk_bytes=_head_scratch(resolved, share),
    )
    return {"journal_dir": f"{SCRATCH_FOLDER}/journals", "durability": config}


def _keeps_whole_model(resolved: ResolvedSpec) -> bool:
    """Return whether the head keeps the journal of a whole model."""
    return resolved.trains_whole_model and resolved.base_model.head.durability.level != "none"


def _head_scratch(resolved: ResolvedSpec, share: float) -> int:
    """Return the size in bytes of a share of the head's scratch space.

    All shares are less than the space together: it also holds other files, and a pod that exceeds
    it is evicted, which ends the run.

    Args:
        resolved: what the session asks for.
        share: the share, which is halved if the base model is stored there too.
    """
    base_model = resolved.base_model
    has_base_model = base_model.source.volume is None and resolved.head_computes
    scratch = parse_quantity(base_model.head.resources.scratch)
    return max(1, int(scratch * (share / 2 if has_base_model else share)))


def _placed_bytes(resolved: ResolvedSpec) -> int:
    """Return a trainer pod's limit for whole models; see `_head_scratch`."""
    if resolved.trainer is None:
        return Limits().max_placed_bytes
    return _trainer_scratch(resolved, resolved.trainer, _VERSION_SHARE)


def _paged_bytes(resolved: ResolvedSpec) -> int:
    """Return the limit for idle models of a pod that trains; see `_head_scratch`."""
    if resolved.trainer is not None and resolved.trainers:
        return _trainer_scratch(resolved, resolved.trainer, _PAGED_SHARE)
    return _head_scratch(resolved, 0 if _keeps_whole_model(resolved) else _PAGED_SHARE)


def _trainer_scratch(resolved: ResolvedSpec, trainer: TrainerShape, share: float) -> int:
    """Return the size in bytes of a share of a trainer pod's scratch space, as `_head_scratch`."""
    has_base_model = resolved.base_model.source.volume is None
    scratch = parse_quantity(trainer.resources.scratch)
    return max(1, int(scratch * (share / 2 if has_base_model else share)))


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
        # The memory planner assumes that activations are recomputed on GPUs.
        max_kept_tokens=0 if trainer.gpus_per_replica else None,
        start_timeout_seconds=trainer.start_timeout_seconds,
    )


def head_json(build: Build) -> str:
    """Return the head's configuration as JSON."""
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

    KubeRay's own Service also publishes heads that are not ready; this one does not.
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
    """Return the NetworkPolicy of the pods.

    It allows traffic within the session, from API server and operator to the head, to DNS, and to
    external ports: object stores, the model hub and external servers have addresses that no policy
    can name.
    """
    own = {"podSelector": {"matchLabels": {labels.SESSION_LABEL: build.names.session}}}
    clients = [{"podSelector": {"matchLabels": wanted}} for wanted in build.settings.client_labels]
    ports = sorted({*build.settings.outgoing_ports, *engines.external_ports(build)})
    # A rule without ports would allow all ports.
    stores = [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}] if ports else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": build.names.network_policy},
        "spec": {
            "podSelector": {"matchLabels": {labels.SESSION_LABEL: build.names.session}},
            "policyTypes": ["Ingress", "Egress"],
            # Pods of the session reach each other at all ports. Ray uses many, and in a process
            # group ranks connect to a store at the head and to each other at ephemeral ports.
            "ingress": [
                {"from": [own]},
                {"from": clients, "ports": [{"protocol": "TCP", "port": labels.HEAD_PORT}]},
            ],
            "egress": [
                {"to": [own]},
                {"ports": DNS_PORTS},
                *stores,
            ],
        },
    }


def claim_templates(build: Build) -> list[Json]:
    """Return the ResourceClaimTemplate by which each pod claims GPUs for its containers to share.

    The list is empty if containers request GPUs as extended resources.
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
            "metadata": {"name": build.names.claim_template(devices.class_name, devices.count)},
            "spec": {
                "spec": {"devices": {"requests": [{"name": GPU_CLAIM, "exactly": exactly}]}},
            },
        }
    ]


def disruption_budget(build: Build) -> Json:
    """Return the PodDisruptionBudget, which prevents voluntary evictions.

    It uses a number of pods instead of `maxUnavailable`, which needs the scale subresource that
    RayClusters lack. Pods that are not ready do not block a drain.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": build.names.disruption_budget},
        "spec": {
            "minAvailable": sum(kind.count for kind in build.resolved.pods),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {labels.SESSION_LABEL: build.names.session},
                **_without_scaled(build),
            },
        },
    }


def _without_scaled(build: Build) -> Json:
    """Return the part of a selector that leaves out engines beyond the minimum."""
    if build.resolved.most_samplers == build.resolved.samplers:
        return {}
    return {"matchExpressions": [{"key": labels.SCALED_LABEL, "operator": "DoesNotExist"}]}
