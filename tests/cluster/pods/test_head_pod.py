"""The head in a real pod that the operator specifies and KubeRay creates."""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_crds import labels
from tinkercloud_operator.children import support_objects
from tinkercloud_operator.decide.session import reconcile
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest, suspended_key
from tinkercloud_protocol.heads.launch import HeadStatus, ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.future_responses import JSON, PROTOBUF
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.engine_image import (
    an_external_server,
    engine_image,
    requested_paths,
)
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import a_secret
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.lost_nodes import PLACEMENT, FurtherNodes
from tinkercloud_testing.cluster.nodes.node import RealNode, head_process
from tinkercloud_testing.cluster.nodes.volumes import a_volume
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.sessions import a_base_model, a_build, a_session
from tinkercloud_testing.small_models.models import save, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
NOBODY = 40001
"""A user id that is not in the image, like those that OpenShift assigns."""
START_SECONDS = 300
GRACE = "terminationGracePeriodSeconds"
RUN = "s:train:0"
SPEC = ModelSpec(owner="ada", lora=LoraConfig(rank=4, seed=1))


@dataclass(frozen=True)
class Session:
    """A RayCluster with only a head, and the options it was created with."""

    cluster: Cluster
    namespace: str
    token: str
    checkpoints: Path
    run_id: str = RUN
    """The id of the run to train."""

    @property
    def url(self) -> str:
        service = self.cluster.get("service", "one-head", self.namespace)
        return f"http://{service['spec']['clusterIP']}:{labels.HEAD_PORT}"

    @property
    def pod(self) -> dict[str, Any]:
        [pod] = self.cluster.objects("pods", self.namespace, f"{labels.COMPONENT_LABEL}=head")
        return pod

    def wait_until_ready(self) -> None:
        """Wait like the operator, until KubeRay reports the head pod as ready."""
        ready = "condition=HeadPodReady"
        self.cluster.wait_for("raycluster/one", ready, self.namespace, START_SECONDS)
        wait_until(self.is_reached, "the head's Service", START_SECONDS)

    def is_reached(self) -> bool:
        """Whether the node forwards to the Service; connections opened earlier never are."""
        request = Request(self.url + routes.HEAD_HEALTH)
        with contextlib.suppress(OSError), urlopen(request, timeout=2) as response:
            return bool(response.status == 200)
        return False

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Send a request with the token of the head, or another one."""
        fields = {
            routes.HEAD_TOKEN_HEADER: self.token,
            routes.TARGET_HEADER: self.run_id,
            "Content-Type": PROTOBUF if path == routes.FORWARD_BACKWARD else JSON,
            "Accept": PROTOBUF,
        } | headers
        request = Request(self.url + path, data=body, headers=fields, method=method)
        try:
            with urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except HTTPError as error:
            return error.code, error.read()

    def whole_models(self, component: str) -> list[str]:
        """Return the files of whole models in the scratch volume of a pod."""
        selector = f"{labels.COMPONENT_LABEL}={component}"
        [pod] = self.cluster.objects("pods", self.namespace, selector)
        name, find = pod["metadata"]["name"], "find /scratch -name model.safetensors"
        where = (
            f"--namespace={self.namespace}",
            f"--container={pod['spec']['containers'][0]['name']}",
        )
        return self.cluster.kubectl("exec", name, *where, "--", *find.split()).split()

    def status(self) -> HeadStatus:
        return HeadStatus.model_validate_json(self.call("GET", routes.HEAD_STATUS)[1])

    def create_run(self, spec: ModelSpec = SPEC) -> None:
        path, body = f"{routes.HEAD_MODELS}/{self.run_id}", spec.model_dump_json().encode()
        assert self.call("PUT", path, body)[0] == 200
        self.result(0)

    def train_a_step(self, seq_id: int) -> float:
        """Send a batch and an optimizer step; return the loss."""
        self.call("POST", routes.FORWARD_BACKWARD, some_data(self.run_id, seq_id))
        step = {
            "model_id": self.run_id,
            "seq_id": seq_id + 1,
            "adam_params": {"learning_rate": 0.01},
        }
        self.call("POST", routes.OPTIM_STEP, json.dumps(step).encode())
        self.result(seq_id + 1)
        return pb.ForwardBackwardOutput.FromString(self.result(seq_id)).metrics["loss:sum"]

    def publish(self, seq_id: int, sampler: int) -> None:
        """Publish the weights of the run to a sampling session."""
        body = {"model_id": self.run_id, "seq_id": seq_id, "sampling_session_seq_id": sampler}
        self.call("POST", routes.SAVE_WEIGHTS_FOR_SAMPLER, json.dumps(body).encode())
        self.result(seq_id)

    def sample(self, sampler: int) -> pb.SampleResponse:
        """Sample two sequences of four tokens."""
        target = {routes.TARGET_HEADER: f"s:sample:{sampler}"}
        asked = {
            "sampling_session_id": f"s:sample:{sampler}",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
        _, promise = self.call("POST", routes.ASAMPLE, json.dumps(asked).encode(), **target)
        return pb.SampleResponse.FromString(
            self._awaited(json.loads(promise)["request_id"], target)
        )

    def result(self, seq_id: int) -> bytes:
        return self._awaited(f"{self.run_id}:{seq_id}", {})

    def _awaited(self, request_id: str, target: Mapping[str, str]) -> bytes:
        """Return the result of a request; as the SDK does, repeat polls that end without it."""
        asked = json.dumps({"request_id": request_id}).encode()
        status, body = 408, b""
        while status == 408:
            status, body = self.call("POST", routes.RETRIEVE_FUTURE, asked, **target)
        assert status == 200, body
        return body

    def is_generation_after(self, generation: str) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self.status().generation != generation
        return False

    def run(self, *command: str) -> str:
        """Run a command in the container of the head and return its output."""
        name, where = self.pod["metadata"]["name"], f"--namespace={self.namespace}"
        return self.cluster.kubectl("exec", name, where, "--", *command)

    def ray_status(self) -> str:
        return self.run("ray", "status")


def first_tokens(sampled: pb.SampleResponse) -> list[int]:
    """Return the first token of each sequence."""
    return [int(np.frombuffer(sequence.tokens, "<i4")[0]) for sequence in sampled.sequences]


def lengths(sampled: pb.SampleResponse) -> list[int]:
    """Return the number of tokens of each sequence."""
    return [len(np.frombuffer(sequence.tokens, "<i4")) for sequence in sampled.sequences]


def some_data(run_id: str, seq_id: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=run_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    tokens = np.array([5, 6, 7], dtype="<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = tokens
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense = np.array([6, 7, 8], dtype="<i8").tobytes()
    targets.dtype = pb.DTYPE_INT64
    return message.SerializeToString()


def a_head(image: str, **fields: Any) -> Mapping[str, Any]:
    return {"image": image, "resources": {"cpu": "500m", "memory": "4Gi"}, **fields}


def children(
    image: str, token: str, namespace: str, shapes: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the children that the operator creates for a session, with a random token."""
    fields = {
        "modelName": "tiny/llama",
        "source": {"volume": {"claimName": "models", "path": "tiny"}},
        "maxContextLength": 512,
        "head": a_head(image),
    }
    base_model = a_base_model(**{**fields, **shapes})
    session = a_session(baseModel="tiny/llama", lora={"rank": 4})
    settings: dict[str, Any] = {
        "checkpoint_claim": "checkpoints",
        "run_as_user": NOBODY,
        "fs_group": NOBODY,
    }
    build = a_build(base_model, session, **settings)
    secret = support_objects.token_secret(build)
    secret["stringData"] = dict.fromkeys(support_objects.SECRET_KEYS, token)
    made = [secret, *reconcile.children(build)]
    return [child | {"metadata": child["metadata"] | {"namespace": namespace}} for child in made]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the node for models and checkpoints, which outlives every pod."""
    folder = tmp_path_factory.mktemp("volumes")
    # Only this user can read the parent folders.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    model = save(tiny_llama(), folder / "models" / "tiny")
    (model / "model.safetensors").chmod(0o644)
    for name in ("checkpoints", "adapters"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    return folder


@contextlib.contextmanager
def starting_session(
    cluster: Cluster, volumes: Path, image: str, **shapes: Any
) -> Iterator[Session]:
    token = secrets.token_hex()
    with cluster.a_namespace("head", **RESTRICTED) as namespace:
        cluster.apply(
            *a_volume("models", namespace, volumes / "models"),
            *a_volume("checkpoints", namespace, volumes / "checkpoints"),
            *a_volume("adapters", namespace, volumes / "adapters"),
            *children(image, token, namespace, {"trainer": {"dtype": "float32"}} | shapes),
        )
        yield Session(cluster, namespace, token, volumes / "checkpoints")


@contextlib.contextmanager
def running_session(
    cluster: Cluster, volumes: Path, image: str, **shapes: Any
) -> Iterator[Session]:
    with starting_session(cluster, volumes, image, **shapes) as session:
        session.wait_until_ready()
        yield session


@pytest.fixture(scope="module")
def image(real_node: RealNode) -> str:
    """Load the image of the worker onto the node and return its name."""
    image = program_image("worker")
    real_node.load(image)
    return image.name


@pytest.fixture(scope="module")
def session(cluster: Cluster, kuberay: KubeRay, volumes: Path, image: str) -> Iterator[Session]:
    with running_session(cluster, volumes, image) as session:
        yield session


def test_a_head_pod_runs_ray_and_the_head_without_root(session: Session) -> None:
    user = session.run("id", "-u")

    assert user == f"{NOBODY}\n"
    assert "Active:" in session.ray_status()
    with socket.create_connection((session.pod["status"]["podIP"], 6379), timeout=10):
        pass


def test_a_head_pod_accepts_requests_only_from_its_own_api_server(session: Session) -> None:
    assert session.status().ready
    assert session.call("GET", routes.HEAD_READY)[0] == 200
    guessed = {routes.HEAD_TOKEN_HEADER: "guessed"}
    assert session.call("GET", routes.HEAD_STATUS, None, **guessed)[0] == 401
    assert session.call("PUT", f"{routes.HEAD_MODELS}/{RUN}", b"{}", **guessed)[0] == 401


def test_a_head_pod_trains(session: Session) -> None:
    session.create_run()

    losses = [session.train_a_step(seq_id) for seq_id in (1, 3, 5)]

    assert losses[0] > losses[1] > losses[2]


def test_a_killed_head_restarts_with_a_new_generation(session: Session) -> None:
    before = session.status().generation

    os.kill(head_process(session.pod), signal.SIGKILL)

    wait_until(lambda: session.is_generation_after(before), "the next head", START_SECONDS)
    session.wait_until_ready()
    assert session.pod["status"]["containerStatuses"][0]["restartCount"] == 1
    assert session.status().models == []
    meant = {routes.GENERATION_HEADER: before}
    assert (
        session.call("GET", routes.HEAD_STATUS, None, **meant)[0] == routes.WRONG_GENERATION_STATUS
    )


def test_the_runs_of_a_deleted_head_pod_resume_in_the_next_one(
    cluster: Cluster, kuberay: KubeRay, volumes: Path, image: str
) -> None:
    with running_session(cluster, volumes, image) as first:
        first.create_run()
        first.train_a_step(1)
        generation, name = first.status().generation, first.pod["metadata"]["name"]
        cluster.delete("raycluster", "one", first.namespace)
        cluster.wait_for(f"pod/{name}", "delete", first.namespace, START_SECONDS)
    left = (volumes / "checkpoints" / suspended_key(RUN)).read_bytes()
    assert SuspendedManifest.model_validate_json(left).generation == generation

    with running_session(cluster, volumes, image) as second:
        second.create_run(SPEC.model_copy(update={"resume_generation": generation}))

        loss = pb.ForwardBackwardOutput.FromString(second.result(1)).metrics["loss:sum"]
        assert second.train_a_step(3) < loss


@pytest.mark.long
def test_a_killed_container_a_deleted_pod_and_a_lost_node_lose_nothing_with_remote_durability(
    cluster: Cluster,
    kuberay: KubeRay,
    further_nodes: FurtherNodes,
    volumes: Path,
    image: str,
) -> None:
    node = further_nodes.add()
    head = a_head(image, durability={"level": "remote"}, placement=PLACEMENT)
    with running_session(cluster, volumes, image, head=head) as session:
        session.create_run()
        losses = [session.train_a_step(1)]
        answers = [session.result(seq_id) for seq_id in (0, 1, 2)]
        first = session.status().generation

        os.kill(head_process(session.pod), signal.SIGKILL)
        wait_until(lambda: session.is_generation_after(first), "the next head", START_SECONDS)
        session.create_run(SPEC.model_copy(update={"resume_generation": first}))
        assert [session.result(seq_id) for seq_id in (0, 1, 2)] == answers
        losses.append(session.train_a_step(3))

        second, name = session.status().generation, session.pod["metadata"]["name"]
        where = (f"--namespace={session.namespace}", "--grace-period=0", "--force")
        cluster.kubectl("delete", "pod", name, *where)
        wait_until(lambda: session.is_generation_after(second), "the next pod", START_SECONDS)
        session.create_run(SPEC.model_copy(update={"resume_generation": second}))
        assert [session.result(seq_id) for seq_id in (0, 1, 2)] == answers
        losses.append(session.train_a_step(5))

        third = session.status().generation
        further_nodes.lose(node)
        further_nodes.report_out_of_service(node)
        further_nodes.add()
        wait_until(session.is_reached, "the head on the next node", START_SECONDS)
        session.create_run(SPEC.model_copy(update={"resume_generation": third}))
        assert [session.result(seq_id) for seq_id in (0, 1, 2)] == answers
        losses.append(session.train_a_step(7))
        assert session.status().durability == "remote"

    with running_session(cluster, volumes, image) as undisturbed:
        undisturbed.create_run()
        assert [undisturbed.train_a_step(seq_id) for seq_id in (1, 3, 5, 7)] == losses


def test_a_head_pod_deleted_during_startup_terminates_promptly(
    cluster: Cluster, kuberay: KubeRay, volumes: Path, image: str
) -> None:
    with starting_session(cluster, volumes, image) as session:
        namespace = session.namespace
        started = "jsonpath={.status.containerStatuses[0].state.running}"
        selector = f"--selector={labels.COMPONENT_LABEL}=head"
        where = (f"--namespace={namespace}", "--timeout=60s", selector)
        cluster.wait_for("raycluster/one", "jsonpath={.status.head.podName}", namespace)
        cluster.kubectl("wait", "pods", f"--for={started}", *where)
        name, grace = session.pod["metadata"]["name"], session.pod["spec"][GRACE]

        cluster.delete("raycluster", "one", namespace)

        cluster.wait_for(f"pod/{name}", "delete", namespace, grace // 2)


@pytest.mark.long
def test_trainer_and_engine_pods_share_no_volume_and_whole_models_bypass_the_head(
    cluster: Cluster, kuberay: KubeRay, real_node: RealNode, volumes: Path, image: str
) -> None:
    engine = engine_image()
    real_node.load(engine)
    resources = {"cpu": "100m", "memory": "2Gi"}
    workers = {"replicas": 1, "cpuRanksPerReplica": 1, "resources": resources, "dtype": "float32"}
    sampler = {
        "backend": "sglang",
        "replicas": 1,
        "image": engine.name,
        "resources": resources,
        "engines": {"processGroup": "gloo"},
    }
    with starting_session(cluster, volumes, image, trainer=workers, sampler=sampler) as session:
        session.wait_until_ready()
        ready = "jsonpath={.status.readyWorkerReplicas}=2"
        cluster.wait_for("raycluster/one", ready, session.namespace, START_SECONDS)
        # Ray updates its list of nodes every few seconds.
        wait_until(lambda: "1 trainer" in session.ray_status(), "the worker in Ray's count")
        session.create_run()
        session.train_a_step(1)

        session.publish(3, sampler=0)
        sampled = session.sample(0)

        assert lengths(sampled) == [4, 4]
        assert {"/load_lora_adapter_from_tensors", "/generate"} <= requested_paths(
            session.cluster, session.namespace
        )

        whole = dataclasses.replace(session, run_id="s:train:1")
        whole.create_run(ModelSpec(owner="ada", lora=None))
        for seq_id in range(1, 41, 2):
            whole.train_a_step(seq_id)
        whole.publish(41, sampler=1)

        # This token follows the prompt in the data of all those steps.
        assert first_tokens(whole.sample(1)) == [8, 8]
        asked = requested_paths(session.cluster, session.namespace)
        assert {"/init_weights_update_group", "/update_weights_from_distributed"} <= asked
        assert not {"/update_weights_from_tensor", "/update_weights_from_disk"} & asked
        assert len(session.whole_models("trainer")) == 1
        assert session.whole_models("head") == []


@pytest.mark.long
def test_an_external_server_reads_adapters_from_a_shared_volume(
    cluster: Cluster, kuberay: KubeRay, real_node: RealNode, volumes: Path, image: str
) -> None:
    real_node.load(engine_image())
    folder = "/mnt/elsewhere"
    servers = {
        "kind": "sglang",
        "urls": ["http://server:30000"],
        "keySecretName": "servers-key",
        "adaptersClaimName": "adapters",
        "adaptersFolder": folder,
    }
    key = secrets.token_hex()
    sampler = {"backend": "external", "external": servers}
    with starting_session(cluster, volumes, image, sampler=sampler) as session:
        by_request = "/load_lora_adapter_from_tensors"
        others = an_external_server("server", key, folder, [by_request])
        owned = [a_secret("servers-key", session.namespace, {"key": key}), *others]
        place = {"namespace": session.namespace}
        cluster.apply(*(each | {"metadata": each["metadata"] | place} for each in owned))
        session.wait_until_ready()
        cluster.wait_for("pod/server", "condition=Ready", session.namespace, START_SECONDS)
        session.create_run()
        session.train_a_step(1)

        session.publish(3, sampler=0)
        sampled = session.sample(0)

        assert lengths(sampled) == [4, 4]
        asked = cluster.kubectl("logs", "server", f"--namespace={session.namespace}")
        assert {"/load_lora_adapter", "/generate"} <= set(asked.split())
        assert by_request in asked.split()
