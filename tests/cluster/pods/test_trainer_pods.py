"""Trainer pods in an installation: two that share a model, and one with two ranks.

The two use the megatron trainer, and an engine in a separate pod samples their weights.

The tests depend on each other: each continues from the state that the previous one left.
"""

import os
import signal
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_crds import labels
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.engine_image import engine_image, requested_paths
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import (
    START_SECONDS,
    Installation,
    an_installation,
    make_volumes,
    values_of_one_node,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster, KubectlFailed
from tinkercloud_testing.cluster.nodes.node import NAME as NODE
from tinkercloud_testing.cluster.nodes.node import RealNode, head_process
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "tiny/llama"
IMAGES = ("api-server", "operator", "worker")
NIC = "rdma.tinkercloud.test/nic"
VARIABLE = "NCCL_IB_HCA"
TWO_PODS: dict[str, Any] = {
    "name": "tiny",
    "spec": {
        "modelName": MODEL,
        "source": {"volume": {"claimName": "models", "path": "tiny"}},
        "maxContextLength": 512,
        "head": {
            "image": "tinkercloud.test/worker:test",
            "resources": {"cpu": "200m", "memory": "3Gi", "sharedMemory": "256Mi"},
        },
        "trainer": {
            "backend": "megatron",
            "replicas": 2,
            "cpuRanksPerReplica": 1,
            "parallelism": {"tensor": 2},
            "dtype": "float32",
            "resources": {"cpu": "100m", "memory": "3Gi", "sharedMemory": "256Mi"},
            "extendedResources": [{"name": NIC, "count": 1}],
            "environment": [{"name": VARIABLE, "value": "=mlx5_0:1"}],
        },
        "sampler": {
            "backend": "sglang",
            "image": "tinkercloud.test/engine:test",
            "replicas": 1,
            "gpusPerReplica": 1,
            "resources": {"cpu": "100m", "memory": "2Gi"},
            "engines": {},
        },
    },
}
TORCH_MODEL = "tiny/llama-by-torch"
ONE_POD = {
    "name": "tiny-by-torch",
    "spec": {
        **TWO_PODS["spec"],
        "modelName": TORCH_MODEL,
        "sampler": {},
        "trainer": {
            "replicas": 1,
            "cpuRanksPerReplica": 2,
            "dtype": "float32",
            "resources": {"cpu": "200m", "memory": "3Gi", "sharedMemory": "256Mi"},
        },
    },
}
RANKS = 'for process in $(grep -l "^ray::Rank" /proc/[0-9]*/cmdline); do {}; done'
"""A shell command for each rank of a pod, with the /proc folder of the rank in `$process`."""
FREEZE = 'kill -STOP "$(basename "${process%/*}")"'
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
        },
    )
    for tokens in ([10, 11, 12, 20, 21], [30, 31, 40, 41, 42, 43], [50, 60])
]


@dataclass
class Story:
    """State that later tests use."""

    training: tinker.TrainingClient


def a_run(client: tinker.ServiceClient, model: str = MODEL) -> tinker.TrainingClient:
    return client.create_lora_training_client(model, rank=4, seed=1).result()


def train_a_step(training: tinker.TrainingClient) -> float:
    """Send a batch and an optimizer step; return the loss."""
    output = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return float(output.result().metrics["loss:sum"])


def logprobs_of_trainer_and_engine(
    training: tinker.TrainingClient,
) -> tuple[list[float], list[float]]:
    """Publish the weights; return the logprobs of a sequence from the trainer and the engine."""
    datum = DATA[1]
    computed = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([*datum.model_input.to_ints(), 43])
    _, *sampled = sampler.compute_logprobs(prompt).result()
    return computed.tolist(), [value for value in sampled if value is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the node with a model of random weights."""
    folder = tmp_path_factory.mktemp("trainers")
    model = save(tiny_llama(), make_volumes(folder) / "tiny")
    (model / "model.safetensors").chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of five steps with the torch trainer in one process."""
    models = {MODEL: folder / "models" / "tiny"}
    with a_server(tmp_path_factory.mktemp("server"), models) as server:
        training = a_run(server.client())
        return [train_a_step(training) for _ in range(5)]


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster, kuberay: KubeRay, real_node: RealNode, folder: Path
) -> Iterator[Installation]:
    real_node.load(*map(program_image, IMAGES), engine_image())
    # The fake engine computes on the CPU, but its pod is scheduled like a real one. No plugin
    # provides the network devices either: the node has what its status declares.
    cluster.patch_status("node", NODE, {"capacity": {"nvidia.com/gpu": "1", NIC: "2"}})
    with an_installation(cluster, folder, values_of_one_node(TWO_PODS, ONE_POD)) as release:
        yield release


@pytest.fixture(scope="module")
def story(installation: Installation) -> Story:
    return Story(a_run(installation.client()))


def pods_of(installation: Installation, component: str) -> list[str]:
    selector = f"{labels.COMPONENT_LABEL}={component}"
    pods = installation.cluster.objects("pods", installation.namespace, selector)
    return sorted(str(pod["metadata"]["name"]) for pod in pods)


def network_of(installation: Installation, pod: str) -> list[str | None]:
    """Return the request and the limit of network devices of a pod's first container."""
    spec = installation.cluster.get("pod", pod, installation.namespace)["spec"]
    needs = spec["containers"][0]["resources"]
    return [needs[kind].get(NIC) for kind in ("requests", "limits")]


def at_ranks(installation: Installation, pod: str, command: str) -> str:
    """Run a command for each rank of a pod, and return the output."""
    script = RANKS.format(command)
    where = f"--namespace={installation.namespace}"
    return installation.cluster.kubectl("exec", pod, where, "--", "bash", "-c", script)


def test_two_pods_have_the_same_losses_as_one_process(
    expected: list[float], installation: Installation, story: Story
) -> None:
    losses = [train_a_step(story.training) for _ in range(2)]

    assert losses == pytest.approx(expected[:2], abs=1e-4)


def test_the_engine_serves_the_published_weights_of_the_trainer_pods(
    expected: list[float], installation: Installation, story: Story
) -> None:
    first, sampled_first = logprobs_of_trainer_and_engine(story.training)
    loss = train_a_step(story.training)
    second, sampled_second = logprobs_of_trainer_and_engine(story.training)

    assert loss == pytest.approx(expected[2], abs=1e-4)
    assert second != pytest.approx(first, abs=1e-2)
    assert sampled_first == pytest.approx(first, abs=1e-4)
    assert sampled_second == pytest.approx(second, abs=1e-4)
    asked = requested_paths(installation.cluster, installation.namespace)
    assert {"/load_lora_adapter_from_tensors", "/generate"} <= asked


def test_each_trainer_pod_has_one_rank_and_the_head_has_none(
    installation: Installation, story: Story
) -> None:
    trainers, [head] = pods_of(installation, "trainer"), pods_of(installation, "head")

    counts = [at_ranks(installation, pod, "echo rank").count("rank") for pod in (*trainers, head)]

    assert counts == [1, 1, 0]


def test_each_trainer_pod_has_its_network_devices_and_its_rank_the_environment_for_them(
    installation: Installation, story: Story
) -> None:
    trainers, [head] = pods_of(installation, "trainer"), pods_of(installation, "head")
    printed = 'tr "\\0" "\\n" < "${process%/*}/environ" | grep "^NCCL_"'

    output = [at_ranks(installation, pod, printed).split() for pod in trainers]

    assert output == [[f"{VARIABLE}==mlx5_0:1"]] * 2
    assert [network_of(installation, pod) for pod in trainers] == [["1", "1"]] * 2
    assert network_of(installation, head) == [None, None]


def test_kubectl_shows_both_trainers(installation: Installation, story: Story) -> None:
    [row] = installation.kubectl("get", "tsess", "--no-headers").splitlines()

    assert row.split()[1:5] == ["Ready", "True", MODEL, "2/2"]


def test_requests_to_a_lost_trainer_pod_fail_and_the_run_continues(
    expected: list[float], installation: Installation, story: Story
) -> None:
    lost, _ = pods_of(installation, "trainer")
    at_ranks(installation, lost, FREEZE)
    pending = story.training.forward_backward(DATA, "cross_entropy")

    installation.kubectl("delete", "pod", lost, "--grace-period=1", "--wait=false")

    with pytest.raises(tinker.RequestFailedError, match="send the data of this step again"):
        pending.result(timeout=START_SECONDS)
    assert train_a_step(story.training) == pytest.approx(expected[3], abs=1e-4)
    assert lost not in pods_of(installation, "trainer")


@pytest.mark.long
def test_a_run_continues_on_new_ranks_after_its_head_was_killed(
    expected: list[float], installation: Installation, story: Story
) -> None:
    [head], trainers = pods_of(installation, "head"), pods_of(installation, "trainer")
    before = {rank for pod in trainers for rank in ranks_of(installation, pod)}
    pod = installation.cluster.get("pod", head, installation.namespace)

    os.kill(head_process(pod), signal.SIGKILL)

    assert train_a_step(story.training) == pytest.approx(expected[4], abs=1e-4)
    wait_until(lambda: is_replaced(installation, before), "ranks of the next head", START_SECONDS)
    assert len(before) == len(trainers)


def ranks_of(installation: Installation, pod: str) -> list[str]:
    """Return an identifier of each rank of a pod: the pod, the process id and the start time.

    Start times, in clock ticks since boot, are not unique: ranks often start in the same tick.
    """
    printed = 'echo "$(basename "${process%/*}")@$(cut -d " " -f 22 "${process%/*}/stat")"'
    return [f"{pod}:{rank}" for rank in at_ranks(installation, pod, printed).split()]


def is_replaced(installation: Installation, before: Set[str]) -> bool:
    """Whether each trainer pod has exactly one rank, which is a new one."""
    try:
        now = [ranks_of(installation, pod) for pod in pods_of(installation, "trainer")]
    except KubectlFailed:
        return False
    return [len(ranks) for ranks in now] == [1, 1] and not before & set(chain(*now))


def test_a_deleted_session_leaves_nothing(installation: Installation, story: Story) -> None:
    [session] = installation.sessions()

    installation.delete_session(session["metadata"]["name"])

    assert installation.sessions() == []


def test_two_ranks_of_one_pod_split_a_batch_and_have_the_same_losses_as_one_process(
    expected: list[float], installation: Installation, story: Story
) -> None:
    training = a_run(installation.client(), TORCH_MODEL)

    losses = [train_a_step(training) for _ in range(2)]

    [trainer] = pods_of(installation, "trainer")
    assert losses == pytest.approx(expected[:2], abs=1e-4)
    assert at_ranks(installation, trainer, "echo rank").count("rank") == 2
