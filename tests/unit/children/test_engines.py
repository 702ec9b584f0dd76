"""Engines in pods of the session, and external inference servers."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_operator.children import engines, support_objects
from tinkercloud_operator.children.pods import GPU_RESOURCE, Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_operator.decide.pods.node_fit import never_fits
from tinkercloud_operator.decide.session.reconcile import children
from tinkercloud_operator.spec.observed import Node
from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_testing.resources.charts import ROOT
from tinkercloud_testing.resources.sessions import (
    ENGINES,
    EXTERNAL,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_session,
)

HEAD: Json = {"image": "worker:1", "resources": {"cpu": "2", "memory": "8Gi"}}


def a_build_with(sampler: Json, **base_model: Any) -> Build:
    return a_build(a_base_model(trainer=TRAINERS, sampler=sampler, **base_model))


def engine_groups(build: Build) -> list[Json]:
    groups: list[Json] = ray_cluster(build)["spec"]["workerGroupSpecs"]
    return [group for group in groups if group["groupName"] != "trainer"]


def pod_of(build: Build) -> Json:
    pod: Json = engine_groups(build)[0]["template"]["spec"]
    return pod


def engine_of(build: Build) -> Json:
    _, engine = pod_of(build)["containers"]
    container: Json = engine
    return container


def options_of(build: Build) -> dict[str, str]:
    """Return the values of an option of the engine."""
    words = engine_of(build)["args"]
    return {
        word: value
        for word, value in itertools.pairwise(words)
        if word.startswith("--") and not value.startswith("--")
    }


def head_pod(build: Build) -> Json:
    pod: Json = ray_cluster(build)["spec"]["headGroupSpec"]["template"]["spec"]
    return pod


def sampling(build: Build) -> SamplerConfig:
    return support_objects.head_config(build).sampler


def test_each_engine_has_a_pod_whose_host_name_the_head_gets() -> None:
    build = a_build_with(ENGINES)

    pods = [group["template"]["spec"] for group in engine_groups(build)]

    hosts = [f"http://{pod['hostname']}.{pod['subdomain']}:30000" for pod in pods]
    assert hosts == [
        "http://sampler-0.one-samplers:30000",
        "http://sampler-1.one-samplers:30000",
    ]
    assert list(sampling(build).inference.urls) == hosts
    assert [group["replicas"] for group in engine_groups(build)] == [1, 1]


def test_host_names_of_unready_engines_resolve() -> None:
    services = {
        child["metadata"]["name"]: child["spec"]
        for child in children(a_build_with(ENGINES))
        if child["kind"] == "Service"
    }

    assert services.keys() == {"one-head", "one-samplers"}
    assert services["one-samplers"]["clusterIP"] == "None"
    assert services["one-samplers"]["publishNotReadyAddresses"]
    assert services["one-samplers"]["selector"] == {
        "tinkercloud.dev/session": "one",
        "tinkercloud.dev/component": "sampler",
    }


def test_an_engine_gets_the_options_of_its_base_model() -> None:
    build = a_build_with(
        {**ENGINES, "gpusPerReplica": 4},
        source={"volume": {"claimName": "models", "path": "qwen/3-8b"}},
        limits={"maxLoraRank": 64},
        maxContextLength=2048,
    )

    assert options_of(build) == {
        "--model-path": "/models/qwen/3-8b",
        "--host": "0.0.0.0",  # noqa: S104 - a pod's own address
        "--port": "30000",
        "--tp-size": "4",
        "--context-length": "2055",
        "--dtype": "bfloat16",
        "--max-lora-rank": "64",
        "--lora-target-modules": "all",
        "--max-loras-per-batch": "3",
        "--lora-drain-wait-threshold": "5",
        "--moe-runner-backend": "triton",
        "--grammar-backend": "llguidance",
    }
    assert {"--enable-lora", "--enable-deterministic-inference"} <= set(engine_of(build)["args"])
    original = {"name": "SGLANG_RETURN_ORIGINAL_LOGPROB", "value": "1"}
    assert original in engine_of(build)["env"]


def test_an_engine_in_float32_uses_the_triton_attention_backend() -> None:
    offered = a_base_model(trainer={**TRAINERS, "dtype": "float32"}, sampler=ENGINES)

    options = options_of(a_build(offered))

    assert (options["--dtype"], options["--attention-backend"]) == ("float32", "triton")


def test_an_engine_uses_the_configured_share_of_gpu_memory() -> None:
    engines_shape = {**ENGINES["engines"], "gpuMemoryPercent": 85}

    given = options_of(a_build_with({**ENGINES, "engines": engines_shape}))
    not_given = options_of(a_build_with(ENGINES))

    assert given["--mem-fraction-static"] == "0.85"
    assert "--mem-fraction-static" not in not_given


def test_an_engine_gets_the_lora_target_modules_of_its_base_model() -> None:
    engines_shape = {**ENGINES["engines"], "loraTargetModules": ["q_proj", "lm_head"]}

    arguments = engine_of(a_build_with({**ENGINES, "engines": engines_shape}))["args"]

    _, _, after = " ".join(arguments).partition("--lora-target-modules ")
    assert after.startswith("q_proj lm_head --")


def test_engine_and_head_share_a_key_that_no_manifest_contains() -> None:
    build = a_build_with(ENGINES)

    start = engine_of(build)["command"][2]

    file = sampling(build).inference.key_file
    assert file == "/etc/tinkercloud-token/token"
    assert f"; key=$(< {file}) || exit 1;" in start
    assert start.endswith('--api-key "$key" --admin-api-key "$key"')
    mounts = {mount["mountPath"] for mount in engine_of(build)["volumeMounts"]}
    assert "/etc/tinkercloud-token" in mounts


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ({"model_type": "qwen3"}, []),
        ({"model_type": "deepseek_v2", "kv_lora_rank": None}, []),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, ["--attention-backend", "triton"]),
    ],
)
def test_latent_attention_uses_kernels_that_every_gpu_supports(
    config: Json, attention: list[str], tmp_path: Path
) -> None:
    engine = engine_of(a_build_with(ENGINES))
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    (tmp_path / "token").write_text("secret")
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = [word.replace("/etc/tinkercloud-token", str(tmp_path)) for word in engine["command"]]
    assert engine["args"][0] == "--model-path"
    options = ["--model-path", str(tmp_path), *engine["args"][2:]]

    started = subprocess.run(
        [*command, *options],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    key = ["--api-key", "secret", "--admin-api-key", "secret"]
    assert started == ["-m", "sglang.launch_server", *attention, *options, *key]


def test_engines_read_adapters_from_the_volume_that_the_head_writes_to() -> None:
    build = a_build_with(ENGINES)
    [head] = head_pod(build)["containers"]

    written = [mount for mount in head["volumeMounts"] if mount["name"] == "adapters"]
    read = [mount for mount in engine_of(build)["volumeMounts"] if mount["name"] == "adapters"]

    volume = {"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters"}}
    assert volume in head_pod(build)["volumes"]
    assert volume in pod_of(build)["volumes"]
    assert written == [{"name": "adapters", "mountPath": "/adapters"}]
    assert read == [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}]
    assert sampling(build).inference.adapters_dir == "/adapters/one"
    assert sampling(build).inference.adapters_seen


def test_without_a_volume_adapters_reach_engines_in_requests() -> None:
    build = a_build_with({**ENGINES, "engines": {}})

    pods = [pod_of(build), head_pod(build)]

    assert "adapters" not in {volume["name"] for pod in pods for volume in pod["volumes"]}
    assert "/adapters" not in {mount["mountPath"] for mount in engine_of(build)["volumeMounts"]}
    assert sampling(build).inference.adapters_dir is None
    assert not sampling(build).inference.adapters_seen


def test_whole_models_use_a_process_group_only_if_the_base_model_sets_it() -> None:
    for backend in ("gloo", "nccl"):
        in_a_group = a_build_with(ENGINES | {"engines": {"processGroup": backend}})
        assert sampling(in_a_group).inference.process_group == backend
    assert sampling(a_build_with(ENGINES)).inference.process_group is None


def test_the_head_of_a_sampling_session_sends_whole_models_through_gloo() -> None:
    sampler = ENGINES | {"engines": {"processGroup": "nccl"}}
    offered = a_base_model(trainer=TRAINERS, sampler=sampler)

    build = a_build(offered, a_session(role="Sampler", lora=None))

    assert sampling(build).inference.process_group == "gloo"


def test_head_and_engines_of_a_session_reach_each_other_at_any_port_and_no_others_do() -> None:
    build = a_build_with(ENGINES | {"engines": {"processGroup": "gloo"}})
    pods = [ray_cluster(build)["spec"]["headGroupSpec"], *engine_groups(build)]

    policy = support_objects.network_policy(build)["spec"]

    own = {"podSelector": {"matchLabels": {"tinkercloud.dev/session": "one"}}}
    labels = own["podSelector"]["matchLabels"].items()
    assert all(labels <= pod["template"]["metadata"]["labels"].items() for pod in pods)
    assert policy["podSelector"] == own["podSelector"]
    # A rule without ports would allow all ports.
    assert [rule for rule in policy["ingress"] if "ports" not in rule] == [{"from": [own]}]
    assert [rule for rule in policy["egress"] if "ports" not in rule] == [{"to": [own]}]


def test_an_engine_has_its_own_image_and_gpus_and_ray_has_none_of_them() -> None:
    build = a_build_with(
        {**ENGINES, "gpusPerReplica": 4, "resources": {"cpu": "8", "memory": "64Gi"}}, head=HEAD
    )

    ray, engine = pod_of(build)["containers"]

    assert (ray["name"], ray["image"]) == ("worker", "worker:1")
    assert (engine["name"], engine["image"]) == ("engine", "sglang:1")
    assert engine["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    assert ray["resources"] == {
        "requests": {"cpu": "200m", "memory": "1Gi"},
        "limits": {"memory": "1Gi"},
    }


def test_models_are_downloaded_with_our_image_not_the_engines() -> None:
    build = a_build_with(ENGINES, head=HEAD, source={"hub": "a/b", "secretName": "hub"})

    [fetching] = pod_of(build)["initContainers"]

    assert fetching["image"] == "worker:1"
    assert fetching["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert options_of(build)["--model-path"] == fetching["command"][-1]


@pytest.mark.parametrize(
    ("sampler", "role", "part"),
    [
        (ENGINES, "Trainer", ["description"]),
        (EXTERNAL, "Trainer", ["description"]),
        (ENGINES, "Sampler", ["description"]),
        (SAMPLERS, "Trainer", ["description"]),
        ({}, "Trainer", []),
        ({}, "Sampler", []),
    ],
    ids=[
        *("engines", "servers of others", "a sampler", "an engine, nothing said of it"),
        *("the head samples", "the head of a sampler samples"),
    ],
)
def test_a_head_without_compute_downloads_no_weights(
    sampler: Json, role: str, part: list[str]
) -> None:
    base_model = a_base_model(trainer=TRAINERS, sampler=sampler)
    session = a_session(role=role, lora={"rank": 8} if role == "Trainer" else None)

    build = a_build(base_model, session)

    [fetching] = head_pod(build)["initContainers"]
    folder = support_objects.head_config(build).model.path
    assert fetching["command"][fetching["command"].index(folder) + 1 :] == part


def test_a_head_that_trains_by_itself_downloads_the_weights() -> None:
    [fetching] = head_pod(a_build(a_base_model(sampler=EXTERNAL)))["initContainers"]

    assert "description" not in fetching["command"]


def test_engines_have_no_credentials_of_stores() -> None:
    base_model = a_base_model(
        trainer=TRAINERS, sampler=ENGINES, source={"hub": "a/b", "secretName": "hub"}
    )

    engine = engine_of(a_build(base_model, checkpoint_secret="store"))

    assert "envFrom" not in engine
    assert all("valueFrom" not in item for item in engine["env"])


def test_an_engine_that_loads_weights_is_ready_and_a_stalled_one_is_restarted() -> None:
    engine = engine_of(a_build_with(ENGINES))

    environment = {item["name"]: item["value"] for item in engine["env"]}
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": 30000}
    assert engine["readinessProbe"]["httpGet"] == {"path": "/health", "port": 30000}
    assert engine["livenessProbe"]["httpGet"] == {"path": "/health_generate", "port": 30000}
    patience = (
        engine["livenessProbe"]["periodSeconds"] * engine["livenessProbe"]["failureThreshold"]
    )
    assert patience >= 1800


@pytest.mark.parametrize("seconds", [1, 1800, 7201])
def test_loading_and_recovery_of_an_engine_have_the_configured_timeout(seconds: int) -> None:
    options = ENGINES["engines"] | {"startTimeoutSeconds": seconds}
    build = a_build_with(ENGINES | {"engines": options})

    startup = engine_of(build)["startupProbe"]

    assert 0 <= startup["periodSeconds"] * startup["failureThreshold"] - seconds < 10
    assert engines.sampler_config(build).inference.recovery_seconds == seconds


def test_the_requests_of_sampler_pods_include_ray() -> None:
    build = a_build_with({**ENGINES, "resources": {"cpu": "1500m", "memory": "4Gi"}})
    [_, _, samplers] = build.resolved.pods

    assert build.resolved.gpus == 2 * 4 + 2 * 2
    assert (samplers.count, samplers.gpus) == (2, 2)
    assert (samplers.resources.cpu, samplers.resources.memory) == ("1700m", "5120Mi")
    assert support_objects.disruption_budget(build)["spec"]["minAvailable"] == 1 + 2 + 2


def test_a_node_that_fits_only_the_engine_is_too_small_for_its_pod() -> None:
    build = a_build_with({**ENGINES, "resources": {"cpu": "32", "memory": "64Gi"}})
    node = Node(labels={}, taints=(), cpu=32.0, memory=1e12, devices={GPU_RESOURCE: 8})

    assert "no node has the capacity for a sampler pod (cpu 32200m" in str(
        never_fits(build.resolved, [node])
    )


def test_backend_sglang_implies_engines() -> None:
    nothing_said = a_build_with(SAMPLERS)

    assert children(nothing_said) == children(a_build_with({**SAMPLERS, "engines": {}}))
    assert sampling(nothing_said).backend == "sglang"
    assert list(sampling(nothing_said).inference.urls) == ["http://sampler-0.one-samplers:30000"]


def test_a_session_with_fewer_engines_has_fewer_urls() -> None:
    base_model = a_base_model(trainer=TRAINERS, sampler=ENGINES)

    build = a_build(base_model, a_session(sampler={"replicas": 1}))

    assert list(sampling(build).inference.urls) == ["http://sampler-0.one-samplers:30000"]
    assert [group["groupName"] for group in engine_groups(build)] == ["sampler-0"]


@pytest.mark.parametrize("sampler", [{}, {"colocated": True}], ids=["torch", "colocated"])
def test_with_torch_the_head_samples_by_itself(sampler: Json) -> None:
    build = a_build_with(sampler)

    services = [child for child in children(build) if child["kind"] == "Service"]

    assert sampling(build) == SamplerConfig()
    assert len(services) == 1
    assert "adapters" not in {volume["name"] for volume in head_pod(build)["volumes"]}


def test_the_head_gets_the_addresses_and_keys_of_external_servers() -> None:
    config = sampling(a_build_with(EXTERNAL))

    assert (config.backend, config.inference.kind) == ("external", "vllm")
    assert config.inference.urls == ("http://vllm.inference:8000", "https://vllm.example.org")
    assert config.inference.key_file == "/etc/tinkercloud-servers/key"
    assert config.inference.adapters_dir == "/adapters/one"
    assert config.inference.adapters_dir_there == "/mnt/adapters/one"


def test_only_the_head_has_the_key_of_external_servers() -> None:
    build = a_build_with(EXTERNAL)
    [head] = head_pod(build)["containers"]
    [trainers] = ray_cluster(build)["spec"]["workerGroupSpecs"]

    volumes = {volume["name"]: volume for volume in head_pod(build)["volumes"]}
    assert volumes["servers-key"]["secret"] == {
        "secretName": "vllm-key",
        "items": [{"key": "key", "path": "key"}],
        "defaultMode": 0o440,
    }
    place = {
        "name": "servers-key",
        "mountPath": "/etc/tinkercloud-servers",
        "readOnly": True,
    }
    assert place in head["volumeMounts"]
    assert "vllm-key" not in json.dumps(trainers)


def test_external_servers_without_a_key_get_none() -> None:
    servers = {"kind": "sglang", "urls": ["http://sglang:30000"]}
    volume = {"adaptersClaimName": "adapters", "adaptersFolder": "/adapters/"}

    build = a_build_with({"backend": "external", "external": servers | volume})

    assert sampling(build).inference.key_file is None
    assert sampling(build).inference.adapters_dir_there == "/adapters/one"
    assert "servers-key" not in {volume["name"] for volume in head_pod(build)["volumes"]}


def test_the_network_policy_allows_only_the_ports_of_external_servers() -> None:
    policy = support_objects.network_policy(a_build_with(EXTERNAL))

    [_, _, outgoing] = policy["spec"]["egress"]
    assert [item["port"] for item in outgoing["ports"]] == [443, 8000]
    assert engines.external_ports(a_build_with(ENGINES)) == []


def test_the_page_about_the_image_of_engines_starts_it_as_a_pod_does() -> None:
    page = (ROOT / "docs" / "contribute" / "gpu-benchmarks.md").read_text()
    block = page[page.index("cat > engine.env") :].partition("```")[0]
    variables, command = block.partition("\nEND\n")[::2]
    build = a_build_with(
        {**ENGINES, "gpusPerReplica": 1},
        source={"volume": {"claimName": "models", "path": "model"}},
        limits={"maxLoraRank": 32},
        maxContextLength=32768,
    )

    engine, user = engine_of(build), pod_of(build)["securityContext"]["runAsUser"]

    wanted = [f"{each['name']}={each['value']}" for each in engine["env"]]
    assert variables.splitlines()[1:] == wanted
    words = command.replace("\\\n", " ").split()
    assert words[words.index("sglang.launch_server") + 1 :] == engine["args"]
    assert words[words.index("--user") + 1] == f"{user}:{user}"


def test_engines_cache_what_they_compile_on_a_volume() -> None:
    build = a_build_with(ENGINES)
    caches = {
        each["name"]: each["value"]
        for each in engine_of(build)["env"]
        if "CACHE" in each["name"] or "WORKSPACE" in each["name"]
    }
    mounts = {each["mountPath"] for each in engine_of(build)["volumeMounts"]}

    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"} <= set(
        caches
    )
    assert all(value.startswith("/tmp/cache") for value in caches.values())  # noqa: S108
    assert "/tmp" in mounts  # noqa: S108
