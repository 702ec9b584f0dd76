"""Children of a session: RayCluster, Services, policies, configuration."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.training_session import MAX_NAME_LENGTH
from tinkercloud_operator.children import support_objects
from tinkercloud_operator.children.pods import CLEAR_SHARED_MEMORY, Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_operator.decide.session.reconcile import children, key_of
from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.launch import HeadConfig
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_session,
)

MAX_RAY_CLUSTER_NAME = 53
LONGEST = "s" * MAX_NAME_LENGTH
WORKERS = a_base_model(trainer=TRAINERS, sampler=SAMPLERS)
ENGINE_PODS = a_base_model(trainer=TRAINERS, sampler=ENGINES)
WITH_COLOCATED_ENGINES = a_base_model(trainer=TRAINERS, sampler=COLOCATED)
CPU_TRAINERS = a_base_model(
    trainer={
        "backend": "megatron",
        "replicas": 2,
        "cpuRanksPerReplica": 2,
        "parallelism": {"tensor": 2},
        "resources": {"cpu": "7", "sharedMemory": "2Gi"},
    }
)
ON_A_VOLUME = {"volume": {"claimName": "models", "path": "qwen"}}
LARGE_HEAD = {"image": "worker", "resources": {"scratch": "300Gi"}}
QUEUED = a_base_model(trainer=TRAINERS, placement={"queueName": "research"})

names = st.from_regex(r"[a-z]([-a-z0-9]{0,12}[a-z0-9])?", fullmatch=True)
endings = st.sampled_from(
    ["-head", "-config", "-token", "-head-svc", "-headless", "-head-head", "-samplers"]
)


def own_names(session: str) -> set[tuple[str, str]]:
    """Return kind and name of a session's children, and of those that KubeRay derives."""
    builds = [a_build(offered, name=session) for offered in (ENGINE_PODS, WITH_COLOCATED_ENGINES)]
    made = [child for build in builds for child in children(build)]
    made.append(support_objects.token_secret(builds[0]))
    derived = {("Service", f"{session}-head-svc"), ("Service", f"{session}-headless")}
    return {(manifest["kind"], manifest["metadata"]["name"]) for manifest in made} | derived


@given(names, endings)
def test_children_of_two_sessions_never_share_a_name(name: str, ending: str) -> None:
    assert own_names(name).isdisjoint(own_names(name + ending))


@given(names, names)
def test_children_of_any_two_sessions_differ(one: str, other: str) -> None:
    assert one == other or own_names(one).isdisjoint(own_names(other))


def test_each_child_of_a_session_has_a_key_of_its_own() -> None:
    build = a_build(WORKERS)

    kinds = [key_of(manifest).kind for manifest in children(build)]

    assert kinds == [
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "Service",
        "RayCluster",
    ]


def test_without_network_policies_there_is_none() -> None:
    build = a_build(network_policies=False)

    assert "NetworkPolicy" not in {key_of(manifest).kind for manifest in children(build)}


@pytest.mark.parametrize(
    ("build", "counts"),
    [
        (a_build(), {}),
        (a_build(WORKERS), {"trainer": 2, "sampler-0": 1}),
        (a_build(WORKERS, a_session(trainer={"replicas": 1})), {"trainer": 1, "sampler-0": 1}),
        (a_build(WORKERS, a_session(role="Sampler", lora=None)), {"sampler-0": 1}),
    ],
    ids=["head alone", "workers", "fewer trainers", "samplers alone"],
)
def test_worker_groups_have_a_fixed_number_of_pods(build: Build, counts: dict[str, int]) -> None:
    groups = ray_cluster(build)["spec"]["workerGroupSpecs"]

    sizes = {
        group["groupName"]: (group["replicas"], group["minReplicas"], group["maxReplicas"])
        for group in groups
    }
    assert sizes == {name: (count, count, count) for name, count in counts.items()}


def test_the_first_container_of_each_pod_is_rays_and_only_engines_follow() -> None:
    spec = ray_cluster(a_build(WORKERS))["spec"]

    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]

    names_found = [[item["name"] for item in pod["spec"]["containers"]] for pod in templates]
    assert names_found == [["head"], ["worker"], ["worker", "engine"]]
    # KubeRay runs these commands before its own.
    assert templates[1]["spec"]["containers"][0]["command"] == [CLEAR_SHARED_MEMORY]


def test_the_head_runs_alongside_ray_in_kuberays_container() -> None:
    template = ray_cluster(a_build())["spec"]["headGroupSpec"]["template"]

    command = template["spec"]["containers"][0]["command"]

    assert template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert 'eval "$KUBERAY_GEN_RAY_START_CMD" &' in command[-1]
    assert "exec python -m tinkercloud_worker /etc/tinkercloud/head.json" in command[-1]


def test_ray_has_long_startup_timeouts_in_every_pod() -> None:
    spec = ray_cluster(a_build(WORKERS))["spec"]
    pods = [
        group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]

    environments = [
        {item["name"]: item["value"] for item in pod["containers"][0]["env"]} for pod in pods
    ]

    patience = {
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_gcs_server_port_wait_time_s": "120",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    assert [patience.items() <= each.items() for each in environments] == [True, True, True]


def ray_params(build: Build) -> dict[str, Json]:
    """Return the `ray start` parameters of each group."""
    spec = ray_cluster(build)["spec"]
    workers = {group["groupName"]: group["rayStartParams"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["rayStartParams"], **workers}


def test_only_trainers_have_ray_cpus_one_for_each_rank() -> None:
    params = ray_params(a_build(WORKERS))

    cpus = {name: values["num-cpus"] for name, values in params.items()}
    assert cpus == {"head": "0", "trainer": "4", "sampler-0": "0"}
    assert params["head"]["num-gpus"] == "0"


def test_ranks_of_a_pod_without_gpus_share_its_cores() -> None:
    build = a_build(CPU_TRAINERS)

    [trainers] = ray_cluster(build)["spec"]["workerGroupSpecs"]

    [worker] = trainers["template"]["spec"]["containers"]
    assert ray_params(build)["trainer"]["num-cpus"] == "2"
    assert {"name": "OMP_NUM_THREADS", "value": "3"} in worker["env"]


def test_rays_object_store_fits_shared_memory_and_all_parameters_are_text() -> None:
    params = ray_params(a_build(CPU_TRAINERS))

    stores = {name: int(values["object-store-memory"]) for name, values in params.items()}
    assert stores == {"head": int(0.8 * 2**30), "trainer": int(0.8 * 2**31)}
    assert all(isinstance(value, str) for values in params.values() for value in values.values())


def test_workers_outlive_the_head_while_it_saves() -> None:
    groups = ray_cluster(a_build(WORKERS))["spec"]["workerGroupSpecs"]

    pods = [group["template"]["spec"] for group in groups]
    hooks = [pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] for pod in pods]
    assert all("FQ_RAY_IP" in hook for hook in hooks)
    assert all(pod["shareProcessNamespace"] for pod in pods)


def test_the_longest_name_of_a_session_is_short_enough_for_kuberay() -> None:
    build = a_build(ENGINE_PODS, name=LONGEST)

    lengths = [len(manifest["metadata"]["name"]) for manifest in children(build)]

    assert len(ray_cluster(build)["metadata"]["name"]) <= MAX_RAY_CLUSTER_NAME
    assert max(lengths) <= MAX_RAY_CLUSTER_NAME


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (a_build(WORKERS), {}),
        (a_build(QUEUED), {labels.QUEUE_LABEL: "research"}),
        (
            a_build(
                a_base_model(trainer=TRAINERS, sessions={"queueNames": ["urgent"]}),
                a_session(queueName="urgent"),
            ),
            {labels.QUEUE_LABEL: "urgent"},
        ),
    ],
    ids=["none", "of the BaseModel", "chosen"],
)
def test_a_queue_is_a_label_and_kueue_owns_spec_suspend(
    build: Build, wanted: dict[str, str]
) -> None:
    cluster = ray_cluster(build)

    assert cluster["metadata"]["labels"] == wanted
    assert "suspend" not in cluster["spec"]


@pytest.mark.parametrize(
    ("build", "pods"),
    [(a_build(), 1), (a_build(WORKERS), 4), (a_build(QUEUED), 3)],
    ids=["head alone", "workers", "trainers"],
)
def test_the_disruption_budget_protects_every_pod(build: Build, pods: int) -> None:
    assert support_objects.disruption_budget(build)["spec"] == {
        "minAvailable": pods,
        # A pod that never becomes ready must not block the drain of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {"tinkercloud.dev/session": "one"}},
    }


@pytest.mark.parametrize("base_model", [WORKERS, ENGINE_PODS], ids=["workers", "engines"])
def test_every_pod_has_the_configured_labels_in_addition_to_ours(base_model: BaseModelSpec) -> None:
    wanted = {"azure.workload.identity/use": "true", "tinkercloud.dev/session": "another"}

    spec = ray_cluster(a_build(base_model, pod_labels=wanted))["spec"]

    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    of_pods = [group["template"]["metadata"]["labels"] for group in groups]
    assert len(of_pods) > 1
    assert {each["azure.workload.identity/use"] for each in of_pods} == {"true"}
    assert {each["tinkercloud.dev/session"] for each in of_pods} == {"one"}
    assert of_pods[0]["tinkercloud.dev/component"] == "head"


def test_the_service_selects_only_the_head_of_its_session() -> None:
    service = support_objects.head_service(a_build())

    assert service["metadata"]["name"] == "one-head"
    assert service["spec"]["selector"] == {
        "tinkercloud.dev/session": "one",
        "tinkercloud.dev/component": "head",
    }
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 8000, "targetPort": 8000, "protocol": "TCP"}
    ]
    assert "publishNotReadyAddresses" not in service["spec"]


def test_only_the_sessions_pods_and_our_programs_reach_a_pod() -> None:
    clients = [{"app": "api-server"}, {"app": "operator"}]

    policy = support_objects.network_policy(a_build(client_labels=clients))

    own = {"podSelector": {"matchLabels": {"tinkercloud.dev/session": "one"}}}
    # OpenShift's DNS pods listen at 5353.
    dns = [
        {"protocol": "UDP", "port": 53},
        {"protocol": "TCP", "port": 53},
        {"protocol": "UDP", "port": 5353},
        {"protocol": "TCP", "port": 5353},
    ]
    assert policy["spec"] == {
        **own,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own]},
            {
                "from": [
                    {"podSelector": {"matchLabels": {"app": "api-server"}}},
                    {"podSelector": {"matchLabels": {"app": "operator"}}},
                ],
                "ports": [{"protocol": "TCP", "port": 8000}],
            },
        ],
        "egress": [{"to": [own]}, {"ports": dns}, {"ports": [{"protocol": "TCP", "port": 443}]}],
    }


def test_a_session_without_store_and_hub_has_no_egress() -> None:
    policy = support_objects.network_policy(a_build(outgoing_ports=[]))

    # A rule without ports or peers would allow all of them.
    assert all(rule.get("ports") or rule.get("to") for rule in policy["spec"]["egress"])
    assert len(policy["spec"]["egress"]) == 2


def parsed_head_config(build: Build) -> Json:
    text: str = support_objects.config_map(build)["data"]["head.json"]
    read: Json = json.loads(text)
    return read


@pytest.mark.parametrize(
    "build",
    [
        a_build(),
        a_build(WORKERS),
        a_build(CPU_TRAINERS),
        a_build(ENGINE_PODS),
        a_build(WORKERS, a_session(role="Sampler", lora=None)),
    ],
    ids=["head alone", "workers", "trainers without GPUs", "engines", "samplers alone"],
)
def test_the_head_parses_its_configuration(build: Build) -> None:
    text = support_objects.config_map(build)["data"]["head.json"]

    assert HeadConfig.model_validate_json(text) == support_objects.head_config(build)


def test_the_head_configuration_follows_base_model_and_session() -> None:
    offered = a_base_model(
        trainer={"dtype": "float32", "maxBatchTokens": 4096, "startTimeoutSeconds": 7200},
        limits={"maxLoraRank": 64},
        maxContextLength=2048,
        head={
            "image": "worker:1",
            "autosave": {"steps": 7, "seconds": 60, "wholeModels": True},
        },
    )
    asked = a_session(trainer={"maxBatchTokens": 1024})

    collector = "http://collector:4318"
    build = a_build(offered, asked, suspend_seconds=90, otlp_endpoint=collector)
    config = support_objects.head_config(build)

    assert config.head == "one"
    assert config.otlp_endpoint == collector
    assert config.model.name == "Qwen/Qwen3-8B"
    assert (config.trainer.dtype, config.trainer.max_batch_tokens) == ("float32", 1024)
    assert config.trainer.start_timeout_seconds == 7200
    assert (config.limits.max_lora_rank, config.limits.max_context_length) == (64, 2048)
    assert config.timings.suspend_seconds == 90
    assert config.autosave == AutosaveConfig(steps=7, seconds=60, whole_models=True)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 8000)  # noqa: S104 - a pod's


@pytest.mark.parametrize(
    ("offered", "room"),
    [
        ({"source": ON_A_VOLUME}, 4 << 30),
        ({"source": ON_A_VOLUME, "head": LARGE_HEAD}, 150 << 30),
        ({}, 2 << 30),
        ({"trainer": TRAINERS, "sampler": ENGINES}, 4 << 30),
    ],
    ids=["scratch of 8Gi", "more", "with the base model", "of a head without weights"],
)
def test_snapshots_are_limited_to_a_share_of_the_heads_scratch_space(
    offered: Json, room: int
) -> None:
    config = support_objects.head_config(a_build(a_base_model(**offered)))

    assert config.limits.max_snapshot_bytes == room


@pytest.mark.parametrize(
    ("offered", "room"),
    [
        ({"source": ON_A_VOLUME, "trainer": TRAINERS}, 4 << 30),
        ({"trainer": TRAINERS}, 2 << 30),
        ({"trainer": {**TRAINERS, "resources": LARGE_HEAD["resources"]}}, 75 << 30),
    ],
    ids=["scratch of 8Gi", "with the base model", "more"],
)
def test_remote_models_are_limited_to_a_share_of_the_trainers_scratch_space(
    offered: Json, room: int
) -> None:
    config = support_objects.head_config(a_build(a_base_model(**offered)))

    assert config.limits.max_placed_bytes == room


@pytest.mark.parametrize(("head", "room"), [({"image": "w"}, 2 << 30), (LARGE_HEAD, 75 << 30)])
def test_idle_models_have_a_share_of_the_heads_scratch_space(head: Json, room: int) -> None:
    config = support_objects.head_config(a_build(a_base_model(source=ON_A_VOLUME, head=head)))

    assert config.limits.max_paged_bytes == room


@pytest.mark.parametrize(
    ("offered", "room"),
    [
        ({"source": ON_A_VOLUME, "trainer": TRAINERS}, 2 << 30),
        ({"trainer": TRAINERS}, 1 << 30),
        ({"trainer": {**TRAINERS, "resources": LARGE_HEAD["resources"]}}, 75 << 29),
    ],
    ids=["scratch of 8Gi", "with the base model", "more"],
)
def test_idle_models_at_trainer_pods_have_a_share_of_their_own_scratch_space(
    offered: Json, room: int
) -> None:
    limits = support_objects.head_config(a_build(a_base_model(**offered))).limits

    assert limits.max_paged_bytes == room
    assert limits.max_placed_bytes == 2 * room


@pytest.mark.parametrize("lora", [{"rank": 8}, None], ids=["adapter", "whole model"])
@pytest.mark.parametrize("source", [{"source": ON_A_VOLUME}, {}], ids=["volume", "download"])
def test_all_that_a_head_keeps_fits_in_its_scratch_space_together(
    source: Json, lora: Json | None
) -> None:
    head = {"image": "worker", "durability": {"level": "local"}, "resources": {"scratch": "4Gi"}}
    session = a_session(lora=lora)

    config = support_objects.head_config(a_build(a_base_model(head=head, **source), session))

    limits, journals = config.limits, config.durability.max_disk_bytes
    assert journals is not None
    assert limits.max_snapshot_bytes + limits.max_paged_bytes + journals <= 0.95 * (4 << 30)


def test_the_head_of_a_sampling_session_does_not_train() -> None:
    offered = a_base_model(trainer={**TRAINERS, "dtype": "float32"})

    config = support_objects.head_config(a_build(offered, a_session(role="Sampler", lora=None)))

    assert (config.trainer.backend, config.trainer.ranks) == ("none", 0)
    assert config.trainer.dtype == "float32"


def test_the_head_configuration_describes_the_trainers() -> None:
    offered = a_base_model(
        trainer={
            **TRAINERS,
            "parallelism": {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2},
        }
    )

    on_gpus = support_objects.head_config(a_build(offered)).trainer
    on_cpus = support_objects.head_config(a_build(CPU_TRAINERS)).trainer

    assert (on_gpus.backend, on_gpus.ranks, on_gpus.device) == ("megatron", 8, "cuda")
    assert (on_gpus.tensor_parallel, on_gpus.pipeline_parallel) == (2, 2)
    assert (on_gpus.context_parallel, on_gpus.expert_parallel) == (2, 2)
    assert (on_cpus.ranks, on_cpus.tensor_parallel, on_cpus.device) == (4, 2, "cpu")


def test_activations_are_recomputed_on_gpus_as_planned() -> None:
    on_gpus = support_objects.head_config(a_build(a_base_model(trainer=TRAINERS))).trainer
    on_cpus = support_objects.head_config(a_build(CPU_TRAINERS)).trainer

    assert (on_gpus.max_kept_tokens, on_cpus.max_kept_tokens) == (0, None)


def test_the_head_configuration_sets_sharding() -> None:
    shape = {"replicas": 2, "gpusPerReplica": 4}

    configs = [
        support_objects.head_config(a_build(a_base_model(trainer=shape | {"sharded": sharded})))
        for sharded in (True, False)
    ]

    assert [config.trainer.sharded for config in configs] == [True, False]
    assert {config.trainer.ranks for config in configs} == {8}


def test_a_session_with_fewer_trainer_pods_has_fewer_ranks() -> None:
    build = a_build(CPU_TRAINERS, a_session(trainer={"replicas": 1}))

    assert support_objects.head_config(build).trainer.ranks == 2


def test_a_head_without_trainer_pods_trains_by_itself() -> None:
    trainer = support_objects.head_config(a_build()).trainer

    assert (trainer.backend, trainer.ranks) == ("torch", 0)


def test_the_head_writes_its_termination_message() -> None:
    build = a_build()

    head = ray_cluster(build)["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]

    assert support_objects.head_config(build).reason_file == "/dev/termination-log"
    assert "terminationMessagePath" not in head


def test_the_configuration_names_the_token_by_file_and_holds_no_secret() -> None:
    build = a_build(
        a_base_model(source={"hub": "a/b", "secretName": "hub-token"}),
        checkpoint_secret="store-credentials",
    )

    read = parsed_head_config(build)

    assert read["token_file"] == "/etc/tinkercloud-token/token"
    assert "hub-token" not in json.dumps(read)
    assert "store-credentials" not in json.dumps(read)
    assert "data" not in support_objects.token_secret(build)


def test_pods_mount_the_secret_that_the_operator_creates() -> None:
    build = a_build()
    secret = support_objects.token_secret(build)["metadata"]["name"]

    cluster = ray_cluster(build)

    volumes = cluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    [mounted] = [volume["secret"] for volume in volumes if "secret" in volume]
    assert mounted == {"secretName": secret, "defaultMode": 0o440}
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": secret}
    assert set(support_objects.SECRET_KEYS) == {"token", "auth_token"}
