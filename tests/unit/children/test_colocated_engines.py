"""Engines in trainer pods: containers that share a pod's GPUs through a device claim."""

import itertools
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.children import support_objects
from tinkercloud_operator.children.pods import GPU_RESOURCE, Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_operator.decide.pods.node_fit import never_fits
from tinkercloud_operator.decide.session.actions import Apply, Stage, stage
from tinkercloud_operator.decide.session.reconcile import children, reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import Node
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_pod,
    a_session,
    observed,
)

OFFERED = a_base_model(trainer=TRAINERS, sampler=COLOCATED)
"""Two trainer pods of four GPUs, each with two engines of two GPUs."""
SAMPLER = a_session(role="Sampler", lora=None)
HEAD_AND_PODS = (a_pod(), *(a_pod("trainer", name=f"one-trainer-{n}") for n in range(2)))


def a_build_with(sampler: Json | None = None, **base_model: Any) -> Build:
    offered = {"trainer": TRAINERS, "sampler": COLOCATED | (sampler or {})} | base_model
    return a_build(a_base_model(**offered))


def groups(build: Build) -> list[Json]:
    found: list[Json] = ray_cluster(build)["spec"]["workerGroupSpecs"]
    return found


def pods(build: Build) -> list[Json]:
    return [group["template"]["spec"] for group in groups(build)]


def options_of(container: Json) -> dict[str, str]:
    return {
        word: value
        for word, value in itertools.pairwise(container["args"])
        if word.startswith("--") and not value.startswith("--")
    }


def environment_of(container: Json) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


def a_node(gpus: int) -> Node:
    return Node(labels={}, taints=(), cpu=128.0, memory=1e12, devices={GPU_RESOURCE: gpus})


def test_the_containers_of_a_trainer_pod_share_its_gpus_through_one_claim() -> None:
    build = a_build(OFFERED)
    [template] = support_objects.claim_templates(build)

    for pod in pods(build):
        assert [container["name"] for container in pod["containers"]] == [
            "worker",
            "engine-0",
            "engine-1",
        ]
        [claim] = pod["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
        for container in pod["containers"]:
            assert container["resources"]["claims"] == [{"name": claim["name"]}]
            assert "nvidia.com/gpu" not in container["resources"]["limits"]
            assert "nvidia.com/gpu" not in container["resources"]["requests"]
    [request] = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert request["exactly"]["count"] == 4
    head = ray_cluster(build)["spec"]["headGroupSpec"]["template"]["spec"]
    assert "resourceClaims" not in head


def test_another_claim_has_another_name_since_its_spec_is_immutable() -> None:
    builds = [
        a_build(OFFERED),
        a_build_with(trainer=TRAINERS | {"gpusPerReplica": 2}, sampler=COLOCATED | {"replicas": 2}),
        a_build_with({"engines": {"deviceClassName": "other"}}),
        a_build(OFFERED, name="two"),
    ]

    names = {support_objects.claim_templates(build)[0]["metadata"]["name"] for build in builds}

    assert len(names) == len(builds)
    assert support_objects.claim_templates(a_build(a_base_model(trainer=TRAINERS))) == []


def test_ray_gets_the_number_of_gpus_as_a_parameter() -> None:
    for group in groups(a_build(OFFERED)):
        assert group["rayStartParams"]["num-gpus"] == "4"
        assert group["rayStartParams"]["num-cpus"] == "4"


def test_each_engine_has_gpus_and_a_port_of_its_own_within_its_pod() -> None:
    for pod in pods(a_build(OFFERED)):
        _, *engines = pod["containers"]
        options = [options_of(engine) for engine in engines]

        assert [item["--base-gpu-id"] for item in options] == ["0", "2"]
        assert [item["--tp-size"] for item in options] == ["2", "2"]
        assert [item["--port"] for item in options] == ["30000", "30001"]
        for engine, item in zip(engines, options, strict=True):
            [port] = engine["ports"]
            assert str(port["containerPort"]) == item["--port"]
            assert engine["startupProbe"]["httpGet"]["port"] == port["containerPort"]


def test_engines_release_memory_and_probes_do_not_sample() -> None:
    build = a_build(OFFERED)

    for engine in pods(build)[0]["containers"][1:]:
        assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(engine["args"])
        assert environment_of(engine)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
        assert options_of(engine)["--cuda-graph-backend-prefill"] == "disabled"
        assert engine["livenessProbe"]["httpGet"]["path"] == "/health"
    assert support_objects.head_config(build).sampler.inference.colocated


def test_engines_outlive_the_head_while_it_saves() -> None:
    for pod in pods(a_build(OFFERED)):
        worker, *engines = pod["containers"]

        for engine in engines:
            assert engine["lifecycle"] == worker["lifecycle"]
            assert environment_of(engine)["FQ_RAY_IP"] == "one-head-svc"
    [_, engine] = pods(a_build(OFFERED, SAMPLER))[0]["containers"]
    assert "lifecycle" not in engine


def test_an_engine_stops_after_its_head() -> None:
    engine = pods(a_build(OFFERED))[0]["containers"][1]
    *shell, script = engine["lifecycle"]["preStop"]["exec"]["command"]
    environment = {**os.environ, **environment_of(engine), "FQ_RAY_IP": "127.0.0.1"}

    with socket.create_server(("127.0.0.1", 0)) as head:
        wait = [*shell, script.replace("6379", str(head.getsockname()[1]))]
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(wait, env=environment, timeout=2, check=False)
    ended = subprocess.run(wait, env=environment, timeout=30, check=False)

    assert ended.returncode == 0


def test_an_engine_does_not_wait_for_the_next_head_behind_the_same_name(tmp_path: Path) -> None:
    engine = pods(a_build(OFFERED))[0]["containers"][1]
    *shell, script = engine["lifecycle"]["preStop"]["exec"]["command"]
    name_server = tmp_path / "getent"
    # The first answer is the head that ends, every later one its successor.
    name_server.write_text('#!/bin/sh\ncd "${0%/*}"\necho "127.0.0.$(ls | wc -l)"\ntouch asked\n')
    name_server.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, **environment_of(engine), "PATH": path}

    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)):
            waiting = subprocess.Popen([*shell, script.replace("6379", str(port))], env=environment)
            head.accept()
            head.close()
            assert waiting.wait(timeout=30) == 0


def test_a_stalled_engine_is_restarted_at_once() -> None:
    engine = pods(a_build(OFFERED))[0]["containers"][1]

    for probe in ("startupProbe", "livenessProbe"):
        assert engine[probe]["terminationGracePeriodSeconds"] <= 10


def test_an_engine_starts_on_gpus_with_unequal_free_memory() -> None:
    colocated, alone = (
        pods(a_build(OFFERED, spec))[0]["containers"][1] for spec in (None, SAMPLER)
    )

    assert environment_of(colocated)["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
    assert "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" not in environment_of(alone)


def test_the_head_gets_a_stable_host_name_of_every_engine() -> None:
    build = a_build(OFFERED)
    services = {
        child["metadata"]["name"]: child["spec"]
        for child in children(build)
        if child["kind"] == "Service"
    }

    names = [f"{pod['hostname']}.{pod['subdomain']}" for pod in pods(build)]

    assert names == ["trainer-0.one-samplers", "trainer-1.one-samplers"]
    assert support_objects.head_config(build).sampler.inference.urls == tuple(
        f"http://{name}:{port}" for name in names for port in (30000, 30001)
    )
    assert [(group["groupName"], group["replicas"]) for group in groups(build)] == [
        ("trainer-0", 1),
        ("trainer-1", 1),
    ]
    assert services["one-samplers"]["publishNotReadyAddresses"]
    assert services["one-samplers"]["selector"]["tinkercloud.dev/component"] == "trainer"
    assert [port["port"] for port in services["one-samplers"]["ports"]] == [30000, 30001]


def test_engines_use_the_configured_memory_and_cache() -> None:
    shape = {**COLOCATED["engines"], "gpuMemoryPercent": 40, "maxCachedTokens": 65536}

    options = options_of(pods(a_build_with({"engines": shape}))[0]["containers"][1])

    assert options["--mem-fraction-static"] == "0.4"
    assert options["--max-total-tokens"] == "65536"


def test_a_pod_has_shared_memory_for_all_its_containers_and_one_copy_of_the_model() -> None:
    build = a_build_with(
        {"resources": {"sharedMemory": "16Gi", "scratch": "300Gi"}},
        trainer=TRAINERS | {"resources": {"sharedMemory": "4Gi", "scratch": "100Gi"}},
    )

    volumes = {volume["name"]: volume for volume in pods(build)[0]["volumes"]}

    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == f"{(4 + 2 * 16) * 1024}Mi"
    assert volumes["scratch"]["emptyDir"]["sizeLimit"] == "300Gi"
    assert volumes["adapters"]["persistentVolumeClaim"] == {"claimName": "adapters"}
    [store] = {group["rayStartParams"]["object-store-memory"] for group in groups(build)}
    assert int(store) < 4 << 30


def test_the_requests_of_trainer_pods_include_their_engines() -> None:
    build = a_build_with({"resources": {"cpu": "1500m", "memory": "4Gi"}})
    _, trainers = build.resolved.pods

    assert build.resolved.gpus == 2 * 4
    assert build.resolved.groups == 1 + 2
    assert (trainers.component, trainers.count) == ("trainer", 2)
    assert trainers.resources.cpu == "4000m"
    assert trainers.resources.memory == f"{(4 + 2 * 4) * 1024}Mi"
    assert support_objects.disruption_budget(build)["spec"]["minAvailable"] == 1 + 2


def test_claimed_devices_are_never_reported_as_never_fits() -> None:
    build = a_build(OFFERED)

    assert never_fits(build.resolved, [a_node(gpus=0)]) is None
    # Larger nodes with such GPUs may still be added.
    large = a_build_with({"resources": {"cpu": "128"}})
    assert never_fits(large.resolved, [a_node(gpus=0)]) is None


def test_a_session_with_fewer_trainers_has_fewer_engines() -> None:
    build = a_build(OFFERED, a_session(trainer={"replicas": 1}))

    assert [group["groupName"] for group in groups(build)] == ["trainer-0"]
    assert support_objects.head_config(build).sampler.inference.urls == (
        "http://trainer-0.one-samplers:30000",
        "http://trainer-0.one-samplers:30001",
    )


def test_a_sampling_session_has_engines_in_pods_of_their_own() -> None:
    build = a_build(OFFERED, SAMPLER)
    [template] = support_objects.claim_templates(build)
    inference = support_objects.head_config(build).sampler.inference

    assert [group["groupName"] for group in groups(build)] == [f"sampler-{n}" for n in range(4)]
    for pod in pods(build):
        ray, engine = pod["containers"]
        [claim] = pod["resourceClaims"]
        assert engine["resources"]["claims"] == [{"name": claim["name"]}]
        assert "claims" not in ray["resources"]
        assert "--enable-memory-saver" not in engine["args"]
        assert "--base-gpu-id" not in engine["args"]
        assert engine["livenessProbe"]["httpGet"]["path"] == "/health_generate"
    assert template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
    assert not inference.colocated
    assert inference.urls[0] == "http://sampler-0.one-samplers:30000"
    assert build.resolved.gpus == 4 * 2


def test_a_head_with_colocated_engines_loads_no_model() -> None:
    [fetching] = ray_cluster(a_build(OFFERED))["spec"]["headGroupSpec"]["template"]["spec"][
        "initContainers"
    ]

    assert fetching["command"][-1] == "description"


def test_the_claim_template_is_created_before_the_pods() -> None:
    seen = observed(base_model=OFFERED, has_finalizer=True)

    plan = reconcile(seen, Settings())

    applied = [action for action in plan.actions if isinstance(action, Apply)]
    [template] = [each for each in applied if each.manifest["kind"] == "ResourceClaimTemplate"]
    assert stage(template) is Stage.SUPPORT
    owners = template.manifest["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [seen.session.uid]


def test_a_missing_claim_api_is_reported_only_if_a_session_needs_it() -> None:
    without = {"has_device_claims": False, "has_finalizer": True}

    plan = reconcile(observed(base_model=OFFERED, **without), Settings())
    other = reconcile(observed(base_model=a_base_model(trainer=TRAINERS), **without), Settings())

    assert plan.actions == ()
    assert plan.status is not None
    ready = find(plan.status.conditions, ConditionType.READY)
    assert ready is not None
    assert ready.reason == Reason.APPLY_FAILED
    assert "sampler.engines.deviceClassName" in ready.message
    assert "Kubernetes 1.34" in ready.message
    assert find(plan.status.conditions, ConditionType.STALLED).status == "True"  # type: ignore[union-attr]
    assert any(isinstance(action, Apply) for action in other.actions)


@pytest.mark.parametrize(("ready", "samplers"), [(2, "4/4"), (1, "2/4"), (0, "0/4")])
def test_engines_are_ready_with_their_trainer_pods(ready: int, samplers: str) -> None:
    head, *trainers = HEAD_AND_PODS
    waiting = [a_pod("trainer", name=pod.name, is_ready=False) for pod in trainers[ready:]]
    there = (head, *trainers[:ready], *waiting)

    status = reconcile(observed(base_model=OFFERED, pods=there), Settings()).status

    assert status is not None
    assert status.workers.samplers == samplers
    assert status.workers.trainers == f"{ready}/2"
