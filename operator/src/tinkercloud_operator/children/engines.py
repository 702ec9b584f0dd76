"""What samples in a head's place: SGLang engines in pods of its session, or servers of others.

An engine runs beside a Ray node of no ranks, in a container of its own: so its image needs neither
Ray nor Tinkercloud, KubeRay starts and counts its pod as any other, Kueue admits it with the rest
of the session, and it goes on, with what it has loaded, while Ray's processes start over.

Colocated engines run in the trainer pods instead, each in a container of its own on its part of the
pod's GPUs, which they give back while the trainer computes.

Each has a name that outlives its pod. The name resolves whether the engine is ready or not: the
head asks the engines themselves, and knows what to do while one does not answer.
"""

from collections.abc import Mapping
from math import ceil
from typing import Literal
from urllib.parse import urlsplit

from tinkercloud_crds import labels
from tinkercloud_crds.shapes import ADAPTER_SLOTS, EnginesShape, ExternalServers
from tinkercloud_operator.children.pods import (
    OUTLIVE_HEAD,
    RAY_HEAD_VARIABLE,
    TOKEN_FOLDER,
    Build,
    Json,
    container,
    model_path,
    probe,
    with_extras,
)
from tinkercloud_operator.spec.resolved import ResolvedSpec
from tinkercloud_protocol.launch import InferenceConfig, SamplerConfig

ADAPTERS_FOLDER = "/adapters"
KEY_FOLDER = "/etc/tinkercloud-servers"
ENGINE_PORT = 30000
"""SGLang's own choice; the next ones are those of further engines in a pod."""

# For latent attention SGLang takes fa3 before Hopper, which does not have it there, and for
# DeepSeek-V3 on Blackwell kernels that are not deterministic; it ends over either. Only the pod
# has the model's configuration: the first option is its folder. The last of equal options counts.
_START = (
    f"key=$(< {TOKEN_FOLDER}/{labels.TOKEN_KEY}) || exit 1;"
    ' if grep -qsE \'"kv_lora_rank": *[1-9]\' "$2/config.json";'
    ' then set -- --attention-backend triton "$@"; fi;'
    ' exec python3 -m sglang.launch_server "$@" --api-key "$key" --admin-api-key "$key"'
)
_ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108 - a volume of the pod's own
    # Compilers name their caches after the user, and a pod's has no entry in /etc/passwd.
    "USER": "engine",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The spare positions may be beyond what the model was made for: nothing is ever there.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # /health draws a token otherwise, which an engine that is loading weights can't.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
_COLOCATED_ENVIRONMENT = {
    # So that the containers of a pod count its GPUs alike.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # An engine ends if its GPUs are not equally free, and those of ranks that load are not.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    # Graphs keep their memory otherwise, when an engine gives back its own.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
}
_ENGINE_VOLUMES = {"token", "scratch", "tmp", "shared-memory", "model"}
"""Volumes that an engine needs of those that all containers have."""
_SPARE_POSITIONS = 7
"""SGLang refuses prompts that leave fewer than this of its context, and draws none of the last; the
head takes what fits."""
_ADAPTER_WAIT_SECONDS = 5
"""After how long an adapter that waits for a slot gets one: the engine starts nothing more with one
of those that have them."""
_ENGINE_STALL_SECONDS = 1800
"""How long an engine may draw no token before it is started over: it draws none while it loads a
whole model's weights."""
_ENGINE_KILL_SECONDS = 5
"""How long an engine that is started over may take to end: its `preStop` waits for a head that
lives."""


def sampler_config(build: Build) -> SamplerConfig:
    """Return what the head is options about sampling."""
    sampler = build.resolved.sampler
    if sampler.external is not None:
        return SamplerConfig(backend="external", inference=_external(build, sampler.external))
    if sampler.engines is None:
        return SamplerConfig(sampled_logprobs=sampler.sampled_logprobs)
    inference = InferenceConfig(
        urls=tuple(f"http://{address}" for address in _addresses(build)),
        key_file=f"{TOKEN_FOLDER}/{labels.TOKEN_KEY}",
        adapters_dir=_adapters_folder(build) if volumes(build) else None,
        adapters_seen=bool(volumes(build)),
        recovery_seconds=sampler.engines.start_timeout_seconds,
        colocated=bool(build.resolved.engines_per_trainer),
        process_group=_process_group(build.resolved, sampler.engines),
        # Engines that are not in the trainer's pod see none of its memory.
        shared_memory=sampler.engines.shared_memory if build.resolved.engines_per_trainer else None,
    )
    return SamplerConfig(backend="sglang", inference=inference)


def _process_group(resolved: ResolvedSpec, engines: EnginesShape) -> Literal["gloo", "nccl"] | None:
    """Return what whole models go over; those of a session that trains nothing lie at the head."""
    return "gloo" if engines.process_group and resolved.trainer is None else engines.process_group


def host_name(component: str, number: int) -> str:
    """Return the name of a pod with engines within their Service; they are counted from 0."""
    return f"{component}-{number}"


def _component(resolved: ResolvedSpec) -> str:
    """Return in which pods engines are."""
    return "trainer" if resolved.engines_per_trainer else "sampler"


def _ports(resolved: ResolvedSpec) -> dict[str, int]:
    """Return the containers of a pod's engines, and where they listen."""
    if not resolved.engines_per_trainer:
        return {"engine": ENGINE_PORT}
    return {
        f"engine-{number}": ENGINE_PORT + number for number in range(resolved.engines_per_trainer)
    }


def _addresses(build: Build) -> list[str]:
    """Return host and port of every engine."""
    resolved = build.resolved
    pods = resolved.trainers if resolved.engines_per_trainer else resolved.samplers
    hosts = [f"{host_name(_component(resolved), pod)}.{build.names.engines}" for pod in range(pods)]
    return [f"{host}:{port}" for host in hosts for port in _ports(resolved).values()]


def volumes(build: Build) -> list[Json]:
    """Return the volumes that the head has for servers' sake, and engines too."""
    sampler = build.resolved.sampler
    resolved = sampler.external or sampler.engines
    if resolved is None or resolved.adapters_claim_name is None:
        return []
    claim = {"claimName": resolved.adapters_claim_name}
    found: list[Json] = [{"name": "adapters", "persistentVolumeClaim": claim}]
    if isinstance(resolved, ExternalServers) and resolved.key_secret_name is not None:
        items = [{"key": "key", "path": "key"}]
        secret = {"secretName": resolved.key_secret_name, "items": items, "defaultMode": 0o440}
        found.append({"name": "servers-key", "secret": secret})
    return found


def head_mounts(build: Build) -> list[Json]:
    """Return where the head has `volumes`."""
    places: dict[str, Json] = {
        "adapters": {"mountPath": ADAPTERS_FOLDER},
        "servers-key": {"mountPath": KEY_FOLDER, "readOnly": True},
    }
    return [{"name": volume["name"], **places[volume["name"]]} for volume in volumes(build)]


def engines(build: Build) -> list[Json]:
    """Return the containers of a pod's engines."""
    engines_spec = build.resolved.sampler.engines
    assert engines_spec is not None  # noqa: S101 - pods that have engines say so
    return [
        _engine(build, engines_spec, name, port) for name, port in _ports(build.resolved).items()
    ]


def _engine(build: Build, engines_spec: EnginesShape, name: str, port: int) -> Json:
    resolved = build.resolved
    sampler, is_colocated = resolved.sampler, bool(resolved.engines_per_trainer)
    assert sampler.image is not None  # noqa: S101 - without one, a session is refused
    body = container(build, name, sampler.image, sampler.resources, sampler.gpus_per_replica)
    mounts = [mount for mount in body["volumeMounts"] if mount["name"] in _ENGINE_VOLUMES]
    adapters = [
        {"name": volume["name"], "mountPath": ADAPTERS_FOLDER, "readOnly": True}
        for volume in volumes(build)
    ]
    environment = _ENVIRONMENT
    if is_colocated:
        head = {RAY_HEAD_VARIABLE: build.names.ray_head_service}
        environment = environment | _COLOCATED_ENVIRONMENT | head
        # A head that stops finishes the step that runs, for which it needs their memory.
        body = body | {"lifecycle": OUTLIVE_HEAD}
    probes = _probes(port, engines_spec.start_timeout_seconds)
    if is_colocated:
        probes = _colocated_probes(probes, port)
    body = body | {
        "command": ["/bin/bash", "-c", _START, name],
        "args": _arguments(build, engines_spec, port),
        "env": [{"name": variable, "value": value} for variable, value in environment.items()],
        "volumeMounts": [*mounts, *adapters],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"}],
        **probes,
    }
    return with_extras(body, sampler)


def _probes(port: int, start_timeout_seconds: int) -> dict[str, Json]:
    up, draws = _get("/health", port), _get("/health_generate", port)
    return {
        "startupProbe": probe(up, period=10, failures=ceil(start_timeout_seconds / 10)),
        "readinessProbe": probe(up, period=10, failures=3),
        # SGLang itself gives a token 20 seconds.
        "livenessProbe": probe(draws, period=60, failures=_ENGINE_STALL_SECONDS // 60)
        | {"timeoutSeconds": 25},
    }


def _colocated_probes(probes: Mapping[str, Json], port: int) -> dict[str, Json]:
    """Return probes of an engine that can't draw while its memory is given away."""
    soon = {"terminationGracePeriodSeconds": _ENGINE_KILL_SECONDS}
    return {
        **probes,
        "startupProbe": {**probes["startupProbe"], **soon},
        "livenessProbe": {**probes["livenessProbe"], **_get("/health", port), **soon},
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
                labels.COMPONENT_LABEL: _component(build.resolved),
            },
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in _ports(build.resolved).items()
            ],
        },
    }


def external_ports(build: Build) -> list[int]:
    """Return the ports at which other people's servers listen."""
    external = build.resolved.sampler.external
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


def _arguments(build: Build, engines_spec: EnginesShape, port: int) -> list[str]:
    base_model, sampler = build.resolved.base_model, build.resolved.sampler
    options = {
        "--model-path": model_path(base_model),
        "--host": "0.0.0.0",  # noqa: S104 - a pod's own address
        "--port": port,
        "--tp-size": max(1, sampler.gpus_per_replica),
        "--context-length": base_model.max_context_length + _SPARE_POSITIONS,
        "--dtype": base_model.trainer.dtype,
        # The kernels for experts that adapters can be added to: on Blackwell SGLang takes others
        # (flashinfer_trtllm), and ends over them. Dense models have no use of it.
        "--moe-runner-backend": "triton",
        **_memory(engines_spec),
    }
    if base_model.trainer.dtype == "float32":
        # Of itself SGLang takes fa3, and flashinfer on Blackwell, which know half precision only.
        options["--attention-backend"] = "triton"
    switches = ["--enable-deterministic-inference", *_adapters(build, engines_spec)]
    if build.resolved.engines_per_trainer:
        # Every container of the pod sees all of its GPUs; SGLang counts from this one.
        options["--base-gpu-id"] = (port - ENGINE_PORT) * sampler.gpus_per_replica
        # SGLang has no graphs of prompts (`breakable`, its choice) whose memory can be given back.
        options["--cuda-graph-backend-prefill"] = "disabled"
        switches += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return [*(str(word) for option in options.items() for word in option), *switches]


def _adapters(build: Build, engines_spec: EnginesShape) -> list[str]:
    """Return the options about adapters."""
    options = {
        "--max-lora-rank": build.resolved.base_model.limits.max_lora_rank,
        # What plans count, as each is as large as the largest adapter. Others wait in the engine's
        # own memory.
        "--max-loras-per-batch": ADAPTER_SLOTS,
        # Otherwise models that are always asked for keep others waiting for ever.
        "--lora-drain-wait-threshold": _ADAPTER_WAIT_SECONDS,
    }
    words = [str(word) for option in options.items() for word in option]
    modules = engines_spec.lora_target_modules or ["all"]
    return ["--enable-lora", "--lora-target-modules", *modules, *words]


def _memory(engines_spec: EnginesShape) -> Json:
    """Return the options about memory that are chosen."""
    found: Json = {}
    if engines_spec.gpu_memory_percent is not None:
        found["--mem-fraction-static"] = engines_spec.gpu_memory_percent / 100
    if engines_spec.max_cached_tokens is not None:
        found["--max-total-tokens"] = engines_spec.max_cached_tokens
    return found


def _get(path: str, port: int) -> Json:
    return {"httpGet": {"path": path, "port": port}}
