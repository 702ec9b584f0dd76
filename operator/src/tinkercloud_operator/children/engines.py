"""What samples in a head's place: SGLang engines in pods of its session, or servers of others.

An engine runs beside a Ray node of no ranks, in a container of its own: so its image needs neither
Ray nor Tinkercloud, KubeRay starts and counts its pod as any other, Kueue admits it with the rest
of the session, and it goes on, with what it has loaded, while Ray's processes start over.

Each has a name that outlives its pod. The name resolves whether the engine is ready or not: the
head asks the engines themselves, and knows what to do while one does not answer.
"""

from urllib.parse import urlsplit

from tinkercloud_crds import labels
from tinkercloud_crds.shapes import ExternalServers
from tinkercloud_operator.children.pods import (
    TOKEN_FOLDER,
    Build,
    Json,
    container,
    model_path,
    probe,
)
from tinkercloud_protocol.launch import InferenceConfig, SamplerConfig

ADAPTERS_FOLDER = "/adapters"
KEY_FOLDER = "/etc/tinkercloud-servers"
ENGINE_PORT = 30000
"""SGLang's own choice."""

_START = (
    f'key=$(< {TOKEN_FOLDER}/{labels.TOKEN_KEY}) && exec python3 -m sglang.launch_server "$@"'
    ' --api-key "$key" --admin-api-key "$key"'
)
_ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108 - a volume of the pod's own
    # Compilers name their caches after the user, and a pod's has no entry in /etc/passwd.
    "USER": "engine",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # /health draws a token otherwise, which an engine that is loading weights can't.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
_OF_ENGINES = {"token", "scratch", "tmp", "shared-memory", "model"}
"""Volumes that an engine needs of those that all containers have."""
_STARTUP_SECONDS = 1800
"""How long an engine may take to load the base model, and the head waits for one that is lost."""
_SILENT_SECONDS = 1800
"""How long an engine may draw no token before it is started over: it draws none while it loads a
whole model's weights."""


def sampler_config(build: Build) -> SamplerConfig:
    """Return what the head is told about sampling."""
    sampler = build.shape.sampler
    if sampler.external is not None:
        return SamplerConfig(backend="external", inference=_external(build, sampler.external))
    if sampler.engines is None:
        return SamplerConfig()
    names = [f"{host_name(number)}.{build.names.engines}" for number in range(sampler.replicas)]
    inference = InferenceConfig(
        urls=tuple(f"http://{name}:{ENGINE_PORT}" for name in names),
        key_file=f"{TOKEN_FOLDER}/{labels.TOKEN_KEY}",
        adapters_dir=_adapters_folder(build) if volumes(build) else None,
        adapters_seen=bool(volumes(build)),
        recovery_seconds=_STARTUP_SECONDS,
        process_group=sampler.engines.process_group,
    )
    return SamplerConfig(backend="sglang", inference=inference)


def host_name(number: int) -> str:
    """Return the name of an engine's pod within its Service; they are counted from 0."""
    return f"sampler-{number}"


def volumes(build: Build) -> list[Json]:
    """Return the volumes that the head has for servers' sake, and engines too."""
    sampler = build.shape.sampler
    shape = sampler.external or sampler.engines
    if shape is None or shape.adapters_claim_name is None:
        return []
    claim = {"claimName": shape.adapters_claim_name}
    found: list[Json] = [{"name": "adapters", "persistentVolumeClaim": claim}]
    if isinstance(shape, ExternalServers) and shape.key_secret_name is not None:
        items = [{"key": "key", "path": "key"}]
        secret = {"secretName": shape.key_secret_name, "items": items, "defaultMode": 0o440}
        found.append({"name": "servers-key", "secret": secret})
    return found


def head_mounts(build: Build) -> list[Json]:
    """Return where the head has `volumes`."""
    places: dict[str, Json] = {
        "adapters": {"mountPath": ADAPTERS_FOLDER},
        "servers-key": {"mountPath": KEY_FOLDER, "readOnly": True},
    }
    return [{"name": volume["name"], **places[volume["name"]]} for volume in volumes(build)]


def engine(build: Build) -> Json:
    """Return the container of an engine."""
    shape = build.shape
    image = shape.sampler.image or shape.base_model.head.image
    body = container(build, "engine", image, shape.sampler.resources, shape.gpus_per_sampler)
    mounts = [mount for mount in body["volumeMounts"] if mount["name"] in _OF_ENGINES]
    adapters = [
        {"name": volume["name"], "mountPath": ADAPTERS_FOLDER, "readOnly": True}
        for volume in volumes(build)
    ]
    up, draws = _get("/health"), _get("/health_generate")
    return body | {
        "command": ["/bin/bash", "-c", _START, "engine"],
        "args": _arguments(build),
        "env": [{"name": name, "value": value} for name, value in _ENVIRONMENT.items()],
        "envFrom": [],
        "volumeMounts": [*mounts, *adapters],
        "ports": [{"name": "engine", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": probe(up, period=10, failures=_STARTUP_SECONDS // 10),
        "readinessProbe": probe(up, period=10, failures=3),
        # SGLang itself gives a token 20 seconds.
        "livenessProbe": probe(draws, period=60, failures=_SILENT_SECONDS // 60)
        | {"timeoutSeconds": 25},
    }


def engines_service(build: Build) -> Json:
    """Return the Service that gives engines their names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": build.names.engines},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {
                labels.SESSION_LABEL: build.names.session,
                labels.COMPONENT_LABEL: "sampler",
            },
            "ports": [
                {
                    "name": "engine",
                    "port": ENGINE_PORT,
                    "targetPort": ENGINE_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def external_ports(build: Build) -> list[int]:
    """Return the ports at which other people's servers listen."""
    external = build.shape.sampler.external
    urls = [urlsplit(url) for url in external.urls] if external is not None else []
    return sorted({url.port or (443 if url.scheme == "https" else 80) for url in urls})


def _external(build: Build, servers: ExternalServers) -> InferenceConfig:
    return InferenceConfig(
        kind=servers.kind,
        urls=tuple(servers.urls),
        model=servers.model,
        key_file=f"{KEY_FOLDER}/key" if servers.key_secret_name is not None else None,
        adapters_dir=_adapters_folder(build),
        adapters_dir_there=f"{servers.adapters_folder.rstrip('/')}/{build.names.session}",
    )


def _adapters_folder(build: Build) -> str:
    """Return the session's own folder: sessions of a BaseModel share its volume."""
    return f"{ADAPTERS_FOLDER}/{build.names.session}"


def _arguments(build: Build) -> list[str]:
    base_model, sampler = build.shape.base_model, build.shape.sampler
    options = {
        "--model-path": model_path(base_model),
        "--host": "0.0.0.0",  # noqa: S104 - a pod's own address
        "--port": ENGINE_PORT,
        "--tp-size": max(1, sampler.gpus_per_replica),
        "--context-length": base_model.max_context_length,
        "--dtype": base_model.trainer.dtype,
        "--max-lora-rank": base_model.limits.max_lora_rank,
        "--lora-target-modules": "all",
    }
    if sampler.engines is not None and sampler.engines.gpu_memory_percent is not None:
        options["--mem-fraction-static"] = sampler.engines.gpu_memory_percent / 100
    pairs = [str(word) for option in options.items() for word in option]
    return [*pairs, "--enable-lora", "--enable-deterministic-inference"]


def _get(path: str) -> Json:
    return {"httpGet": {"path": path, "port": ENGINE_PORT}}
