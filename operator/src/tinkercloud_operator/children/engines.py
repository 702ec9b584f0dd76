"""SGLang engines in pods of a session, and inference servers that others operate.

An engine runs in a container of its own, alongside a Ray node without ranks. Its image needs
neither Ray nor Tinkercloud, KubeRay starts and counts its pod like any other, Kueue admits it
together with the rest of the session, and it keeps its loaded weights while Ray's processes
restart.

Colocated engines run in the trainer pods instead, each in its own container on a part of the pod's
GPUs, and release GPU memory while the trainer computes.

Each engine has a stable host name that resolves whether the engine is ready or not: the head talks
to the engines directly and handles one that does not respond.
"""

from collections.abc import Mapping
from math import ceil
from typing import Literal
from urllib.parse import urlsplit

from tinkercloud_crds import labels
from tinkercloud_crds.pods.shapes import ADAPTER_SLOTS, EnginesShape, ExternalServers
from tinkercloud_operator.children.pods import (
    CLEAR_SHARED_MEMORY,
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
from tinkercloud_protocol.heads.engine_scaling_settings import EngineScaling
from tinkercloud_protocol.heads.launch import InferenceConfig, SamplerConfig

ADAPTERS_FOLDER = "/adapters"
KEY_FOLDER = "/etc/tinkercloud-servers"
ENGINE_PORT = 30000
"""SGLang's default; further engines of a pod use the following ports."""

# For models with latent attention SGLang selects fa3 on GPUs before Hopper, which do not support
# it, and for DeepSeek-V3 on Blackwell it selects non-deterministic kernels; it exits in both cases.
# Only the pod has the model's configuration: the first option is its folder. For repeated options,
# the last one wins.
_START = (
    f"{CLEAR_SHARED_MEMORY}; "
    f"key=$(< {TOKEN_FOLDER}/{labels.TOKEN_KEY}) || exit 1;"
    ' if grep -qsE \'"kv_lora_rank": *[1-9]\' "$2/config.json";'
    ' then set -- --attention-backend triton "$@"; fi;'
    ' exec python3 -m sglang.launch_server "$@" --api-key "$key" --admin-api-key "$key"'
)
_CACHE = "/tmp/cache"  # noqa: S108 - a volume of the pod's own
_CACHES = {
    "CUDA_CACHE_PATH": f"{_CACHE}/cuda",
    "CUTE_DSL_CACHE_DIR": f"{_CACHE}/cute",
    "FLASHINFER_WORKSPACE_BASE": f"{_CACHE}/flashinfer",
    "HF_HOME": f"{_CACHE}/huggingface",
    "NUMBA_CACHE_DIR": f"{_CACHE}/numba",
    "SGLANG_CACHE_DIR": f"{_CACHE}/sglang",
    "SGLANG_DG_CACHE_DIR": f"{_CACHE}/deep-gemm",
    "TILELANG_CACHE_DIR": f"{_CACHE}/tilelang",
    "TORCHINDUCTOR_CACHE_DIR": f"{_CACHE}/inductor",
    "TORCH_EXTENSIONS_DIR": f"{_CACHE}/torch-extensions",
    "TRITON_CACHE_DIR": f"{_CACHE}/triton",
    "TVM_FFI_CACHE_DIR": f"{_CACHE}/tvm-ffi",
    "XDG_CACHE_HOME": _CACHE,
}
"""Folders of what SGLang 0.5 and its libraries compile. SGLang's images are built for root with a
writable root file system; here they have another user, and can write to volumes only. Cubins of
flashinfer are not redirected: they would be downloaded instead of read from the image."""
_ENVIRONMENT = {
    **_CACHES,
    "HOME": "/tmp",  # noqa: S108 - a volume of the pod's own
    # Compilers name their caches after the user, who has no entry in the pod's /etc/passwd.
    "USER": "engine",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The spare positions may exceed the model's maximum context length; they are never used.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Otherwise /health samples a token, which an engine that is loading weights cannot do.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
_COLOCATED_ENVIRONMENT = {
    # All containers of a pod must number its GPUs in the same order.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Otherwise an engine exits if its GPUs differ in free memory, as they do while ranks load.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    # Otherwise CUDA graphs keep their memory when an engine releases its own.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
}
_ENGINE_VOLUMES = {"token", "scratch", "tmp", "shared-memory", "model"}
"""The common volumes of containers that an engine also needs."""
_SPARE_POSITIONS = 7
"""SGLang rejects prompts that leave fewer positions of its context than this, and samples no last
token; the head enforces the real limit."""
_ADAPTER_WAIT_SECONDS = 5
"""Time after which an adapter that waits for a slot gets one: the engine then stops starting
requests for the adapters that have a slot."""
_ENGINE_STALL_SECONDS = 1800
"""Time without a sampled token after which an engine is restarted; none is sampled while it loads
the weights of a whole model."""
_ENGINE_KILL_SECONDS = 5
"""Grace period of an engine that a probe restarts; its `preStop` hook would wait for a running
head."""


def sampler_config(build: Build) -> SamplerConfig:
    """Return the head's configuration for sampling."""
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
        scaling=_scaling(sampler.engines),
        colocated=bool(build.resolved.engines_per_trainer),
        process_group=_process_group(build.resolved, sampler.engines),
    )
    return SamplerConfig(backend="sglang", inference=inference)


def _scaling(engines: EnginesShape) -> EngineScaling | None:
    """Return how the number of engines follows the load; None if it is fixed."""
    if engines.min_replicas is None or engines.max_replicas is None:
        return None
    return EngineScaling(
        min_engines=engines.min_replicas,
        target_samples=engines.target_samples,
        up_seconds=engines.scale_up_seconds,
        down_seconds=engines.scale_down_seconds,
    )


def _process_group(resolved: ResolvedSpec, engines: EnginesShape) -> Literal["gloo", "nccl"] | None:
    """Return the transport for whole models; a sampling session has them only at the head."""
    return "gloo" if engines.process_group and resolved.trainer is None else engines.process_group


def host_name(component: str, number: int) -> str:
    """Return the host name of a pod with engines within their Service, numbered from 0."""
    return f"{component}-{number}"


def _component(resolved: ResolvedSpec) -> str:
    """Return the component whose pods contain the engines."""
    return "trainer" if resolved.engines_per_trainer else "sampler"


def _ports(resolved: ResolvedSpec) -> dict[str, int]:
    """Return the port of each engine container of a pod, by container name."""
    if not resolved.engines_per_trainer:
        return {"engine": ENGINE_PORT}
    return {
        f"engine-{number}": ENGINE_PORT + number for number in range(resolved.engines_per_trainer)
    }


def _addresses(build: Build) -> list[str]:
    """Return host and port of every engine."""
    resolved = build.resolved
    pods = resolved.trainers if resolved.engines_per_trainer else resolved.most_samplers
    hosts = [f"{host_name(_component(resolved), pod)}.{build.names.engines}" for pod in range(pods)]
    return [f"{host}:{port}" for host in hosts for port in _ports(resolved).values()]


def volumes(build: Build) -> list[Json]:
    """Return the volumes for adapters and server keys that the head, and engines, mount."""
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
    """Return the head's mounts of `volumes`."""
    places: dict[str, Json] = {
        "adapters": {"mountPath": ADAPTERS_FOLDER},
        "servers-key": {"mountPath": KEY_FOLDER, "readOnly": True},
    }
    return [{"name": volume["name"], **places[volume["name"]]} for volume in volumes(build)]


def engines(build: Build) -> list[Json]:
    """Return the engine containers of a pod."""
    engines_spec = build.resolved.sampler.engines
    assert engines_spec is not None  # noqa: S101 - only called for pods with engines
    return [
        _engine(build, engines_spec, name, port) for name, port in _ports(build.resolved).items()
    ]


def _engine(build: Build, engines_spec: EnginesShape, name: str, port: int) -> Json:
    resolved = build.resolved
    sampler, is_colocated = resolved.sampler, bool(resolved.engines_per_trainer)
    assert sampler.image is not None  # noqa: S101 - a session without an image is rejected
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
        # A stopping head finishes the current step, which needs the engines' memory.
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
        # SGLang's own timeout for the token is 20 seconds.
        "livenessProbe": probe(draws, period=60, failures=_ENGINE_STALL_SECONDS // 60)
        | {"timeoutSeconds": 25},
    }


def _colocated_probes(probes: Mapping[str, Json], port: int) -> dict[str, Json]:
    """Return the probes of an engine that cannot sample while its memory is released."""
    soon = {"terminationGracePeriodSeconds": _ENGINE_KILL_SECONDS}
    return {
        **probes,
        "startupProbe": {**probes["startupProbe"], **soon},
        "livenessProbe": {**probes["livenessProbe"], **_get("/health", port), **soon},
    }


def engines_service(build: Build) -> Json:
    """Return the headless Service that gives engines their host names."""
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
    """Return the ports of external inference servers."""
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
    """Return the session's own folder: the sessions of a BaseModel share its volume."""
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
        # These expert kernels support adapters. On Blackwell SGLang selects others by default
        # (flashinfer_trtllm) and exits. The option has no effect on dense models.
        "--moe-runner-backend": "triton",
        # Heads send grammars in its dialect.
        "--grammar-backend": "llguidance",
        **_memory(engines_spec),
    }
    if base_model.trainer.dtype == "float32":
        # SGLang's defaults, fa3 and, on Blackwell, flashinfer, only support half precision.
        options["--attention-backend"] = "triton"
    switches = ["--enable-deterministic-inference", *_adapters(build, engines_spec)]
    if build.resolved.engines_per_trainer:
        # Every container of the pod sees all of its GPUs; SGLang starts at this one.
        options["--base-gpu-id"] = (port - ENGINE_PORT) * sampler.gpus_per_replica
        # The memory of SGLang's default prefill graphs (`breakable`) cannot be released.
        options["--cuda-graph-backend-prefill"] = "disabled"
        switches += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return [*(str(word) for option in options.items() for word in option), *switches]


def _adapters(build: Build, engines_spec: EnginesShape) -> list[str]:
    """Return the options for adapters."""
    options = {
        "--max-lora-rank": build.resolved.base_model.limits.max_lora_rank,
        # The memory planner counts these slots, each as large as the largest adapter. Further
        # adapters wait in host memory.
        "--max-loras-per-batch": ADAPTER_SLOTS,
        # Otherwise adapters with constant traffic starve the others.
        "--lora-drain-wait-threshold": _ADAPTER_WAIT_SECONDS,
    }
    words = [str(word) for option in options.items() for word in option]
    modules = engines_spec.lora_target_modules or ["all"]
    return ["--enable-lora", "--lora-target-modules", *modules, *words]


def _memory(engines_spec: EnginesShape) -> Json:
    """Return the options for memory that the BaseModel sets."""
    found: Json = {}
    if engines_spec.gpu_memory_percent is not None:
        found["--mem-fraction-static"] = engines_spec.gpu_memory_percent / 100
    if engines_spec.max_cached_tokens is not None:
        found["--max-total-tokens"] = engines_spec.max_cached_tokens
    return found


def _get(path: str, port: int) -> Json:
    return {"httpGet": {"path": path, "port": port}}
