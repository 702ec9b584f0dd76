"""The API server on Kubernetes: real SDK, real kube-apiserver, real heads.

The tests play the operator's part: they write a session's status and Secret, as its contract says.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_api.providers.cluster_api import (
    ClusterApi,
    ClusterUnreachable,
    ResourceVersionGone,
)
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_protocol import routes
from tinkercloud_protocol.launch import BaseModelSource, HeadConfig, Listen
from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.control_plane import ControlPlane
from tinkercloud_testing.cluster.programs import ROOT
from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.postgresql import a_postgresql
from tinkercloud_testing.servers import API_KEY, Server, free_port
from tinkercloud_testing.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
MODEL = "tiny/llama"
OWNER = "bootstrap"
ACCOUNT = "tinkercloud-api"
ADAM = types.AdamParams(learning_rate=0.01)
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
    loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4},
)
RULES = [
    {
        "apiGroups": ["tinkercloud.dev"],
        "resources": ["trainingsessions"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {
        "apiGroups": ["tinkercloud.dev"],
        "resources": ["basemodels"],
        "verbs": ["list", "watch"],
    },
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
]


def step(training: tinker.TrainingClient) -> float:
    result = training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(ADAM).result()
    return result.result().metrics["loss:sum"]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Head:
    """A head process, as a pod would run it: restarted under the same name, on the same port."""

    folder: Path
    model: Path
    store: Path
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=secrets.token_hex)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "token").write_text(self.token)
        config = HeadConfig(
            head="head",
            model=BaseModelSource(name=MODEL, path=str(self.model)),
            token_file=str(self.folder / "token"),
            checkpoint_root=self.store.as_uri(),
            scratch_dir=str(self.folder / "scratch"),
            listen=Listen(port=self.port),
        )
        (self.folder / "head.json").write_text(config.model_dump_json(exclude_defaults=True))
        with (self.folder / "head.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinkercloud_worker", str(self.folder / "head.json")],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            )
        wait_until(self.is_ready, "head")

    def is_ready(self) -> bool:
        headers = {routes.HEAD_TOKEN_HEADER: self.token}
        request = urllib.request.Request(self.url + routes.HEAD_READY, headers=headers)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class World:
    """A namespace with a base model, and API servers in it that share a catalog: PostgreSQL."""

    cluster: Cluster
    namespace: str
    folder: Path
    model: Path
    kubeconfig: Path
    database_url: str
    heads: list[Head] = field(default_factory=list)

    def server(self, name: str) -> Server:
        settings = {
            "KUBECONFIG": str(self.kubeconfig),
            "TINKERCLOUD_PROVIDER": "kubernetes",
            "TINKERCLOUD_NAMESPACE": self.namespace,
            "TINKERCLOUD_DATABASE_URL": self.database_url,
            "TINKERCLOUD_CHECKPOINT_ROOT": (self.folder / "store").as_uri(),
            "TINKERCLOUD_TIMINGS__LONG_POLL_SECONDS": "2",
        }
        return Server({}, self.folder / name, settings)

    def a_head(self) -> Head:
        folder = self.folder / f"head-{len(self.heads)}"
        head = Head(folder, self.model, self.folder / "store")
        self.heads.append(head)
        head.start()
        return head

    def session(self, name: str) -> dict[str, Any]:
        return self.cluster.get("trainingsession", name, self.namespace)

    def sessions(self) -> list[str]:
        found = self.cluster.objects("trainingsessions", self.namespace)
        return [item["metadata"]["name"] for item in found]

    def new_session(self, known: list[str]) -> str:
        """Wait for a session that was not there before, and return its name."""
        wait_until(lambda: bool(set(self.sessions()) - set(known)), "a TrainingSession")
        [name] = set(self.sessions()) - set(known)
        return name

    def say(
        self, name: str, *conditions: tuple[ConditionType, str, Reason, str], **status: Any
    ) -> None:
        """Write a session's status, of its specification as it is now."""
        generation = self.session(name)["metadata"]["generation"]
        written = [
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": now(),
            }
            for kind, value, reason, message in conditions
        ]
        status |= {"conditions": written, "observedGeneration": generation}
        self.cluster.patch_status("trainingsession", name, status, self.namespace)

    def make_ready(self, name: str, head: Head, incarnation: str = "pod-a.0") -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-token", "namespace": self.namespace},
            "stringData": {"token": head.token},
        }
        self.cluster.apply(secret)
        ready = (ConditionType.READY, "True", Reason.READY, "")
        self.say(name, ready, endpoint=head.url, incarnation=incarnation)

    def a_training_client(self, server: Server, **options: Any) -> tinker.TrainingClient:
        """Return a client of a run whose session gets a head of its own."""
        known = self.sessions()
        client = server.client()
        waiting = client.create_lora_training_client(MODEL, rank=4, seed=1, **options)
        self.make_ready(self.new_session(known), self.a_head())
        return waiting.result()


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    for file in sorted((ROOT / "crds").glob("tinkercloud.dev_*.yaml")):
        cluster.apply_text(file.read_text())
    cluster.wait_for("crd/trainingsessions.tinkercloud.dev", "condition=Established")
    with cluster.a_namespace("provider") as namespace:
        cluster.apply(*access(namespace), a_base_model("tiny", namespace))
        kubeconfig = cluster.kubeconfig_of(ACCOUNT, namespace, folder)
        model = save(tiny_llama(), folder / "llama")
        with a_postgresql() as postgresql:
            catalog = postgresql.new_database()
            made = World(cluster, namespace, folder, model, kubeconfig, catalog)
            yield made
            for head in made.heads:
                head.kill()


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    one = world.server("one")
    one.start()
    yield one
    one.close_clients()
    one.stop()


@pytest.fixture(scope="module")
def other(world: World) -> Iterator[Server]:
    """Another replica."""
    two = world.server("two")
    two.start()
    yield two
    two.close_clients()
    two.stop()


def access(namespace: str) -> list[dict[str, Any]]:
    metadata = {"name": ACCOUNT, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", **metadata}
    role = {"kind": "Role", "name": ACCOUNT, "apiGroup": rbac}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": RULES},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [subject],
            "roleRef": role,
        },
    ]


def a_base_model(name: str, namespace: str, model_name: str = MODEL) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "BaseModel",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "modelName": model_name,
            "source": {"volume": {"claimName": "models", "path": "llama"}},
            "maxContextLength": 512,
            "head": {"image": "head"},
            "sessions": {"queueNames": ["research"], "maxIdleTimeoutSeconds": 7200},
        },
    }


def a_declared_session(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"baseModel": MODEL, "owner": OWNER, "lora": {"rank": 4}, **spec},
    }


def test_a_created_model_is_a_training_session_that_trains_and_goes_with_its_client(
    world: World, server: Server
) -> None:
    known = world.sessions()

    with server.client() as client:
        tags = {"tinkercloud.dev/queue": "research", "tinkercloud.dev/idle-timeout": "600"}
        waiting = client.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata=tags)
        name = world.new_session(known)
        world.make_ready(name, world.a_head())
        training = waiting.result()
        losses = [step(training), step(training)]
        sampler = training.save_weights_and_get_sampling_client().result()
        drawn = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
        made = world.session(name)

    assert losses[1] < losses[0]
    assert len(drawn) == 3
    assert made["spec"]["modelId"] == training.model_id
    assert made["spec"]["lora"]["rank"] == 4
    assert made["spec"]["queueName"] == "research"
    assert made["spec"]["idle"] == {"timeoutSeconds": 600, "action": "Suspend"}
    assert made["metadata"]["labels"]["tinkercloud.dev/owner"] == OWNER
    world.cluster.wait_for(f"trainingsession/{name}", "delete", world.namespace)


def test_another_replica_answers_for_a_run_it_never_saw(
    world: World, server: Server, other: Server
) -> None:
    training = world.a_training_client(server)
    step(training)

    answer = other.result(f"{training.model_id}:1")
    info = other.post("get_info", {"model_id": training.model_id})

    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert info.json()["model_name"] == MODEL


def test_a_run_made_through_one_replica_is_trained_and_listed_through_another(
    world: World, server: Server, other: Server
) -> None:
    made = world.a_training_client(server)
    holder = other.client().holder
    there = tinker.TrainingClient(holder, 0, made.model_id, info=made.get_info())

    losses = [step(there), step(there)]
    saved = there.save_state("from-two").result().path
    runs = other.rest().list_training_runs(limit=100).result().training_runs

    assert losses[1] < losses[0]
    assert made.model_id in [run.training_run_id for run in runs]
    assert server.rest().get_weights_info_by_tinker_path(saved).result().lora_rank == 4


def test_a_model_asked_for_through_two_replicas_at_once_is_made_once(
    world: World, server: Server, other: Server
) -> None:
    known = world.sessions()
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
    }

    with ThreadPoolExecutor(8) as pool:
        promises = list(pool.map(lambda each: each.post("create_model", body), [server, other] * 4))
        name = world.new_session(known)
        world.make_ready(name, world.a_head())
        [request_id] = {str(promise.json()["request_id"]) for promise in promises}
        results = list(pool.map(lambda each: each.result(request_id), [server, other]))

    assert [result.json()["model_id"] for result in results] == [f"{session_id}:train:0"] * 2
    assert set(world.sessions()) - set(known) == {name}


def test_requests_of_a_minute_are_one_write_at_most(world: World, server: Server) -> None:
    training = world.a_training_client(server)
    step(training)
    name = next(
        session["metadata"]["name"]
        for session in world.cluster.objects("trainingsessions", world.namespace)
        if session["spec"].get("modelId") == training.model_id
    )
    before = world.session(name)["metadata"]["resourceVersion"]

    for _ in range(10):
        step(training)

    assert world.session(name)["metadata"]["resourceVersion"] == before


def test_a_queued_session_says_what_it_waits_for(world: World, server: Server) -> None:
    known = world.sessions()
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    promise = server.post("create_model", {**create, "lora_config": {"rank": 4}}).json()
    name = world.new_session(known)
    world.say(name, (ConditionType.READY, "False", Reason.QUEUED, "behind 3 others in research"))

    def waiting() -> dict[str, object]:
        return server.post("retrieve_future", {"request_id": promise["request_id"]}).json()

    wait_until(lambda: waiting()["queue_state"] == "paused_capacity", "the status to be seen")

    assert waiting()["queue_state_reason"] == (
        f"TrainingSession {name}: Queued: behind 3 others in research"
    )


@pytest.mark.parametrize(
    ("reason", "category"),
    [(Reason.NOT_ALLOWED, "user"), (Reason.NEVER_FITS, "server")],
)
def test_a_session_that_never_fits_fails_its_run_at_once(
    world: World, server: Server, reason: Reason, category: str
) -> None:
    known = world.sessions()
    waiting = server.client().create_lora_training_client(MODEL, rank=8)
    name = world.new_session(known)

    world.say(
        name,
        (ConditionType.READY, "False", reason, "needs 16 GPUs"),
        (ConditionType.STALLED, "True", reason, "needs 16 GPUs"),
    )

    with pytest.raises(tinker.RequestFailedError, match=f"{reason}: needs 16 GPUs") as caught:
        waiting.result()
    assert caught.value.category.value == category


def test_what_the_base_model_does_not_allow_is_refused_before_anything_is_made(
    world: World, server: Server
) -> None:
    known = world.sessions()
    choice = {"tinkercloud.dev/queue": "production"}

    with pytest.raises(tinker.BadRequestError, match=r"'production' is not allowed.*'research'"):
        server.client().create_lora_training_client(MODEL, user_metadata=choice).result()

    assert world.sessions() == known


def test_an_unknown_choice_is_refused_with_those_that_exist(server: Server) -> None:
    answer = server.post("create_session", {"sdk_version": "1", "tags": ["tinkercloud.dev/gpus=8"]})

    assert answer.status == 400
    assert "accepted are tinkercloud.dev/session, tinkercloud.dev/queue" in answer.detail


def test_a_head_that_was_replaced_unnoticed_never_gets_its_predecessors_requests(
    world: World, server: Server
) -> None:
    training = world.a_training_client(server)
    step(training)
    saved = training.save_state("first").result().path
    head = world.heads[-1]

    head.kill()
    head.start()

    with pytest.raises((tinker.TinkerError, ValueError), match="has stopped") as caught:
        step(training)
    assert saved in str(caught.value)


def test_a_session_suspended_for_idleness_is_resumed_by_the_next_request(
    world: World, server: Server
) -> None:
    reference = world.a_training_client(server)
    expected = [step(reference) for _ in range(4)]
    known = world.sessions()
    training = world.a_training_client(server)
    [name] = set(world.sessions()) - set(known)
    losses = [step(training), step(training)]
    head = world.heads[-1]
    head.stop()
    idle = (ConditionType.SUSPENDED, "True", Reason.IDLE, "unused for 600 s")
    world.say(name, idle, (ConditionType.READY, "False", Reason.SUSPENDED, ""), endpoint=None)
    asleep = now()

    going_on = training.forward_backward([DATUM], "cross_entropy")
    wait_until(lambda: last_activity(world, name) > asleep, "the session to be wanted again")
    head.start()
    world.make_ready(name, head, incarnation="pod-b.0")
    training.optim_step(ADAM).result()
    losses += [going_on.result().metrics["loss:sum"], step(training)]

    assert losses == expected


def last_activity(world: World, name: str) -> str:
    return str(world.session(name)["metadata"]["annotations"]["tinkercloud.dev/last-activity"])


def test_a_deleted_session_ends_its_run(world: World, server: Server) -> None:
    known = world.sessions()
    training = world.a_training_client(server)
    [name] = set(world.sessions()) - set(known)
    step(training)

    world.cluster.kubectl("delete", "trainingsession", name, f"--namespace={world.namespace}")
    world.heads[-1].kill()

    with pytest.raises((tinker.TinkerError, ValueError), match="has stopped"):
        step(training)
    assert name not in world.sessions()


def test_a_client_attaches_to_a_session_declared_in_git(
    world: World, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.cluster.apply(a_declared_session("declared", world.namespace))
    world.make_ready("declared", world.a_head())
    known = world.sessions()
    monkeypatch.setenv("TINKER_TAGS", "mine,tinkercloud.dev/session=declared")

    with server.client() as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        loss = step(training)

    assert loss > 0
    assert world.sessions() == known


def test_a_client_that_asks_for_something_else_than_was_declared_is_told_the_difference(
    world: World, server: Server
) -> None:
    world.cluster.apply(a_declared_session("wide", world.namespace, lora={"rank": 64}))
    wanted = {"tinkercloud.dev/session": "wide"}

    with pytest.raises(tinker.BadRequestError, match=r"lora\.rank: 64 there, 4 here"):
        server.client().create_lora_training_client(MODEL, rank=4, user_metadata=wanted).result()


def test_a_session_of_another_owner_does_not_exist(world: World, server: Server) -> None:
    world.cluster.apply(a_declared_session("theirs", world.namespace, owner="somebody"))
    wanted = {"tinkercloud.dev/session": "theirs"}

    with pytest.raises(tinker.NotFoundError, match="does not exist for this owner"):
        server.client().create_lora_training_client(MODEL, rank=4, user_metadata=wanted).result()


def test_samplers_without_a_trainer_share_one_session(world: World, server: Server) -> None:
    key = server.new_key("sampling-only")
    known = world.sessions()
    client = server.client(key)
    one = client.create_sampling_client(base_model=MODEL).result()
    text = types.ModelInput.from_ints([5, 6, 7])
    scored = one.compute_logprobs(text)
    name = world.new_session(known)
    world.make_ready(name, world.a_head())

    two = client.create_sampling_client(base_model=MODEL).result()

    assert scored.result() == two.compute_logprobs(text).result()
    assert world.session(name)["spec"]["role"] == "Sampler"
    assert set(world.sessions()) - set(known) == {name}


def test_a_missing_right_is_named(world: World, server: Server) -> None:
    without = [rule for rule in RULES if rule["resources"] != ["trainingsessions"]]
    reading = {**RULES[0], "verbs": ["get", "list", "watch"]}
    role = access(world.namespace)[1]
    world.cluster.apply({**role, "rules": [*without, reading]})

    with pytest.raises(tinker.RequestFailedError, match="service account the Role of the chart"):
        server.client().create_lora_training_client(MODEL, rank=4).result()
    world.cluster.apply(role)


def test_training_goes_on_while_kubernetes_is_away(
    world: World, server: Server, control_plane: ControlPlane
) -> None:
    training = world.a_training_client(server)
    step(training)

    control_plane.api_server.kill()
    loss = step(training)
    control_plane.api_server.start()

    assert loss > 0
    assert server.process is not None
    assert server.process.poll() is None
    assert step(world.a_training_client(server)) > 0


async def test_a_watch_from_too_long_ago_is_told_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await ClusterApi.connect(world.namespace)

    with pytest.raises(ResourceVersionGone):
        _seen = [event async for event in api.watch("trainingsessions", "1", seconds=5)]

    await api.close()


async def test_a_watch_that_falls_silent_is_taken_for_dead(
    world: World, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await ClusterApi.connect(world.namespace)
    listing = await api.list_all("basemodels")
    process = control_plane.api_server.process
    assert process is not None
    events = api.watch("basemodels", listing.resource_version, seconds=2)
    world.cluster.apply(a_base_model("awaited", world.namespace, "tiny/awaited"))
    first = await anext(events)

    process.send_signal(signal.SIGSTOP)

    with pytest.raises(ClusterUnreachable):
        _more = [event async for event in events]
    process.send_signal(signal.SIGCONT)
    assert first.object["metadata"]["name"] == "awaited"
    await api.close()


def test_a_server_that_slept_through_changes_learns_of_them(
    world: World, server: Server, control_plane: ControlPlane
) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    world.cluster.apply(a_base_model("late", world.namespace, "tiny/late"))
    control_plane.api_server.restart()

    server.process.send_signal(signal.SIGCONT)

    def offered() -> bool:
        listed = server.request("GET", "/api/v1/get_server_capabilities", key=API_KEY)
        return b"tiny/late" in listed.body

    wait_until(offered, "the new base model")
